//go:build deploy

package deploy

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/stretchr/testify/require"
)

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	require.NoError(t, err, "%s %s\n%s", name, strings.Join(args, " "), out)
	t.Logf("%s", out)
}

func TestAlertsFireAndRest(t *testing.T) {
	run(t, "promtool", "check", "rules", "alerts.yaml")
	run(t, "promtool", "test", "rules", "alerts_test.yaml")
}

// What Grafana replaces before it asks is replaced here, and promtool parses the rest.
func TestDashboardsQueriesAreOfPromQL(t *testing.T) {
	var rules strings.Builder
	rules.WriteString("groups: [{name: dashboard, rules: [\n")
	n := 0
	for _, p := range panels(t) {
		for _, target := range p.Targets {
			query, ok := target.(*prometheus.Dataquery)
			if !ok {
				q, isValue := target.(prometheus.Dataquery)
				require.True(t, isValue, "%s: a target of type %T", *p.Title, target)
				query = &q
			}
			expr := strings.NewReplacer("$__rate_interval", "5m", "$__range", "1h", "$job", ".*", "$instance", ".*").Replace(query.Expr)
			require.NotContains(t, expr, "$", *p.Title)
			fmt.Fprintf(&rules, "{record: 'dashboard:q%d', expr: '%s'},\n", n, strings.ReplaceAll(expr, "'", "''"))
			n++
		}
	}
	rules.WriteString("]}]\n")
	file := filepath.Join(t.TempDir(), "dashboard.yaml")
	require.NoError(t, os.WriteFile(file, []byte(rules.String()), 0o644))
	run(t, "promtool", "check", "rules", file)
	require.Greater(t, n, 40)
}

// The schemas are those of the Kubernetes API; strict refuses keys that it does not have.
func TestManifestsAreOfKubernetesSchema(t *testing.T) {
	run(t, "python3", "-m", "kubernetes_validate", "--strict", "-k", "1.37.0", "daemonset.yaml", "sidecar.yaml")
}

func TestContainerRecipeIsLinted(t *testing.T) {
	run(t, "hadolint", "Containerfile")
}
