// Package pynixl holds tests against NIXL's own Python API, and of agents of different releases of the NIXL library
// against each other (build tag pynixl, make test-pynixl). They need the folders .nixl-python and .nixl-versions.
package pynixl
