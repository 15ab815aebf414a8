package nixl

import (
	"path/filepath"
	"strings"
)

// Wheel names the Python package that the library belongs to, with its version,
// such as nixl_cu12-1.5.1. It is "" for a library that lies in none, and for one
// that the system's loader found by its name. The C API itself tells no version.
func (l *Library) Wheel() string {
	file, err := filepath.EvalSymlinks(l.Path)
	if err != nil {
		return ""
	}
	// The package's metadata lies beside the directory of its libraries.
	found, _ := filepath.Glob(filepath.Join(globEscape(filepath.Dir(filepath.Dir(file))), "nixl*.dist-info")) // the pattern is well formed
	if len(found) != 1 {
		return ""
	}
	return strings.TrimSuffix(filepath.Base(found[0]), ".dist-info")
}
