// Package crate finds the C header of the NIXL C API in the released crate
// nixl-sys, whose version cgo_test/abi/Cargo.toml names.
package crate

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
)

// Header finds the header in cargo's registry, which cargo fills if needed.
func Header() (path, version string, err error) {
	_, self, _, _ := runtime.Caller(0)
	manifest := filepath.Join(filepath.Dir(self), "..", "abi", "Cargo.toml")
	if out, err := exec.Command("cargo", "fetch", "--quiet", "--manifest-path", manifest).CombinedOutput(); err != nil {
		return "", "", fmt.Errorf("cargo fetch: %w\n%s", err, out)
	}
	cmd := exec.Command("cargo", "metadata", "--offline", "--format-version", "1", "--manifest-path", manifest)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", "", fmt.Errorf("cargo metadata: %w\n%s", err, stderr.Bytes())
	}
	var metadata struct {
		Packages []struct {
			Name, Version string
			ManifestPath  string `json:"manifest_path"`
		}
	}
	if err := json.Unmarshal(out, &metadata); err != nil {
		return "", "", fmt.Errorf("cargo metadata: %w", err)
	}
	for _, p := range metadata.Packages {
		if p.Name == "nixl-sys" {
			return filepath.Join(filepath.Dir(p.ManifestPath), "wrapper.h"), p.Version, nil
		}
	}
	return "", "", fmt.Errorf("%s does not depend on nixl-sys", manifest)
}

var (
	comments  = regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`)
	functions = regexp.MustCompile(`\b(nixl_capi_\w+)\s*\(`)
)

// Uncomment takes the comments out of C text.
func Uncomment(text string) string { return comments.ReplaceAllString(text, "") }

// Functions lists the functions that a header without comments declares.
func Functions(header string) []string {
	var names []string
	for _, m := range functions.FindAllStringSubmatch(header, -1) {
		names = append(names, m[1])
	}
	return names
}
