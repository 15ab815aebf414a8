// Package cgotest holds the tests of package nixl that need processes of their
// own: peers that are stopped or killed, signals, environments, and libraries
// that do not load. A test starts its binary again as the child it needs.
package cgotest
