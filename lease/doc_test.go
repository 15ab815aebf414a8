package lease

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// The documentation's table must name tests that exist.
func TestTheDocumentationNamesRealTests(t *testing.T) {
	doc, err := os.ReadFile("doc.go")
	require.NoError(t, err)
	files, err := filepath.Glob("*_test.go")
	require.NoError(t, err)
	var tests []string
	for _, f := range files {
		src, err := os.ReadFile(f)
		require.NoError(t, err)
		for _, m := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllSubmatch(src, -1) {
			tests = append(tests, string(m[1]))
		}
	}
	named := regexp.MustCompile(`Test\w+`).FindAllString(string(doc), -1)
	require.Greater(t, len(named), 25)
	for _, n := range named {
		require.True(t, slices.Contains(tests, n), n)
	}
}
