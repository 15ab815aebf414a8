package metrics

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nixlgo/nixlgo/nixl"
)

const module = "github.com/nixlgo/nixlgo"

// RegisterBuildInfo registers nixlgo_build_info with reg: a gauge of 1 whose labels are the version of this module, of Go
// and of NIXL, and the file of the NIXL library. What is not known is "unknown", as the version of a NIXL that is no wheel;
// before the library is loaded both are "none". One for a process, without a rank; a second call changes nothing.
func RegisterBuildInfo(reg prometheus.Registerer) error {
	err := reg.Register(buildInfo{})
	if _, again := errors.AsType[prometheus.AlreadyRegisteredError](err); err != nil && !again {
		return fmt.Errorf("metrics: register: %w", err)
	}
	return nil
}

type buildInfo struct{}

var buildInfoDesc = describeOne("build_info", "Versions of what runs here.", "version", "go_version", "nixl_version", "library")

func (buildInfo) Describe(out chan<- *prometheus.Desc) { out <- buildInfoDesc }

func (buildInfo) Collect(out chan<- prometheus.Metric) {
	version, library := "none", "none"
	if l := nixl.Loaded(); l != nil {
		_, v, _ := strings.Cut(l.Wheel(), "-")
		version, library = cmp.Or(v, "unknown"), l.Path
	}
	out <- prometheus.MustNewConstMetric(buildInfoDesc, prometheus.GaugeValue, 1, moduleVersion(), runtime.Version(), version, library)
}

// moduleVersion is the version of this module in the program.
func moduleVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, m := range append(info.Deps, &info.Main) {
		if m.Path == module {
			return cmp.Or(m.Version, "unknown")
		}
	}
	return "unknown"
}
