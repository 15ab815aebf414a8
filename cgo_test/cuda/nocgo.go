//go:build !cgo

package cuda

import "errors"

// Alloc needs cgo.
func Alloc(int) (uint64, error) { return 0, errors.New("cuda: built without cgo") }
