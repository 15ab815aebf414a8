// Package deploy tests the files of this directory. What needs a tool of somebody else has the build tag deploy:
// make deploy-check installs the tools. That every series exists is tested in internal/docscheck.
package deploy

import (
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/stretchr/testify/require"
)

// panels are those of the dashboard, without the rows.
func panels(t *testing.T) (out []dashboard.Panel) {
	t.Helper()
	plugins.RegisterDefaultPlugins()
	raw, err := os.ReadFile("dashboard.json")
	require.NoError(t, err)
	//lint:ignore SA1019 the second version of the schema is no file that every Grafana imports
	var strict, d dashboard.Dashboard
	require.Empty(t, strict.UnmarshalJSONStrict(raw)) // no nil error where all is well, but a list without any
	require.NoError(t, json.Unmarshal(raw, &d))       // for the strict one leaves panels out
	for _, p := range d.Panels {
		if p.Panel != nil {
			out = append(out, *p.Panel)
		}
	}
	return out
}

// The schema is Grafana's own, of dashboards and of each kind of panel: a key that it does not know is an error, and so is one
// that is missing.
func TestDashboardIsOfGrafanasSchema(t *testing.T) {
	ids := map[uint32]bool{}
	for _, p := range panels(t) {
		require.NotNil(t, p.Id)
		require.False(t, ids[*p.Id], "two panels with id %d", *p.Id)
		ids[*p.Id] = true
		require.NotEmpty(t, p.Targets, *p.Title)
	}
	require.Greater(t, len(ids), 20)
}

// A folder that the command has packages in and the recipe does not copy would show in nobody's build but a user's.
func TestContainerRecipeCopiesWhatTheCommandIsMadeOf(t *testing.T) {
	recipe, err := os.ReadFile("Containerfile")
	require.NoError(t, err)
	list, err := exec.Command("go", "list", "-deps", "-f", "{{if .Module}}{{if .Module.Main}}{{.ImportPath}}{{end}}{{end}}", "..").Output()
	require.NoError(t, err)
	folders := map[string]bool{}
	for p := range strings.FieldsSeq(string(list)) {
		_, rest, inside := strings.Cut(strings.TrimPrefix(p, "github.com/"), "/nixlgo/")
		folder, _, _ := strings.Cut(rest, "/")
		if inside {
			folders[folder] = true
		}
	}
	require.Greater(t, len(folders), 3)
	for folder := range folders {
		require.Contains(t, string(recipe), "COPY "+folder+" "+folder+"\n")
	}
}
