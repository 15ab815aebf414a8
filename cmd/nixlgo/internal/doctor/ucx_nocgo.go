//go:build !cgo

package doctor

func ucxVersion(string) string { return "" } // without cgo no UCX is loaded
