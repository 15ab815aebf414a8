// Package diagnose examines what NIXL needs of a machine: variables, limits, devices. It says what is wrong, and what to set.
// It does not load the library, so nothing that it does can crash or hang: the command doctor prints its findings, and errors
// of package nixl end with those that explain them.
package diagnose

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Status is the verdict of a finding.
type Status string

// The verdicts. Only Fail makes the command doctor fail.
const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "fail"
)

// Finding is the result of one check.
type Finding struct {
	Name   string    `json:"name"` // of the check, or of the environment variable
	Status Status    `json:"status"`
	Value  string    `json:"value"`         // as found
	Cause  string    `json:"cause"`         // why it is so, or what follows from it
	Remedy string    `json:"remedy"`        // what to do; "" when nothing is wrong
	Fix    []Setting `json:"fix,omitempty"` // variables that put it right, if variables can
}

// Setting is a variable to set, or to unset.
type Setting struct {
	Name  string `json:"name"`
	Value string `json:"value"` // "": unset it
}

func (f Finding) fail(cause, remedy string) Finding {
	f.Status, f.Cause, f.Remedy = Fail, cause, remedy
	return f
}

func (f Finding) warn(cause, remedy string) Finding {
	f.Status, f.Cause, f.Remedy = Warn, cause, remedy
	return f
}

// fix says which value of its own variable puts the finding right, "" for none.
func (f Finding) fix(value string) Finding {
	f.Fix = []Setting{{f.Name, value}}
	return f
}

// Findings returns what can be said without the library, in the order of the report.
func (h *Host) Findings() []Finding {
	devices, err := readDevices(h.FS)
	found := append(h.checkEnv(devices), h.checkDevices(devices, err)...)
	return append(found, h.checkMemLock(usable(devices)), h.checkOpenFiles(), h.checkDescriptors(), h.checkShm(), h.checkCopy())
}

// Explain says what is wrong with the host, of the checks whose name begins with one of topics: what was found, why that is
// wrong, and what to do. Whatever the topics, a process that is short of file descriptors is said, for then anything fails. It
// returns "" when nothing is wrong.
func (h *Host) Explain(topics ...string) string {
	var parts []string
	for _, f := range h.Findings() {
		asked := f.Name == descriptors || slices.ContainsFunc(topics, func(t string) bool { return strings.HasPrefix(f.Name, t) })
		if f.Status == OK || !asked {
			continue
		}
		value := ": " + f.Value
		if _, variable := h.Env[f.Name]; variable {
			value = fmt.Sprintf("=%q", f.Value)
		}
		parts = append(parts, f.Name+value+": "+f.Cause+": "+f.Remedy)
	}
	return strings.Join(parts, "; ")
}

// Explain is Host.Explain of this machine and process, as they are now.
func Explain(topics ...string) string { return ThisHost().Explain(topics...) }

// suspects are the variables that most often keep a library from working.
var suspects = []string{"UCX_TLS", "UCX_NET_DEVICES", "NIXL_PLUGIN_DIR", "LD_PRELOAD", "LD_LIBRARY_PATH", libraryVariable}

// Advise gives a failure of the library a remedy: first of all the limits that the process is near, then the variables that are
// set.
func (h *Host) Advise(f Finding) Finding {
	if f.Status != Fail {
		return f
	}
	if f.Name == "ucx" {
		f.Fix = h.withoutUCX()
	}
	f.Remedy = cmp.Or(f.Remedy, h.suspect(f.Name))
	devices, _ := readDevices(h.FS) // Findings tells the error
	for _, limit := range []Finding{h.checkMemLock(usable(devices)), h.checkDescriptors()} {
		if limit.Status != OK {
			f.Cause = fmt.Sprintf("%s, %s: %s; %s", limit.Name, limit.Value, limit.Cause, f.Cause)
			f.Remedy = limit.Remedy + "; if that is not it, " + f.Remedy
		}
	}
	return f
}

// suspect is the remedy for a failed check of the library that has none of its own.
func (h *Host) suspect(check string) (remedy string) {
	var set []string
	for _, name := range suspects {
		if name == libraryVariable && check != "library" && check != "agents" {
			continue // it is a library of NIXL that comes so far
		}
		if v, ok := h.Env[name]; ok {
			set = append(set, name+"="+v)
		}
	}
	if len(set) > 0 {
		remedy = "correct or unset " + strings.Join(set, ", ") + "; "
	}
	return remedy + "see what UCX and NIXL print to standard error; UCX_LOG_LEVEL=info and NIXL_LOG_LEVEL=INFO make them print more"
}

// withoutUCX takes the UCX libraries out of LD_PRELOAD: NIXL brings its own.
func (h *Host) withoutUCX() []Setting {
	entries := strings.FieldsFunc(h.Env["LD_PRELOAD"], func(r rune) bool { return r == ':' || r == ' ' })
	rest := slices.DeleteFunc(slices.Clone(entries), func(file string) bool {
		return strings.HasPrefix(file[strings.LastIndexByte(file, '/')+1:], "libuc")
	})
	if len(rest) == len(entries) {
		return nil
	}
	return []Setting{{"LD_PRELOAD", strings.Join(rest, ":")}}
}

// Exports are shell commands, a line each, that put right what variables can put right of found. A comment before them says
// why. Where findings name a variable twice, the first counts.
func Exports(found []Finding) string {
	var b strings.Builder
	done := map[string]bool{}
	for _, f := range found {
		if f.Status == OK {
			continue
		}
		for _, s := range f.Fix {
			if done[s.Name] {
				continue
			}
			done[s.Name] = true
			fmt.Fprintf(&b, "# %s: %s\n", f.Name, strings.ReplaceAll(cmp.Or(f.Cause, f.Value), "\n", " "))
			if s.Value == "" {
				fmt.Fprintf(&b, "unset %s\n", s.Name)
			} else {
				fmt.Fprintf(&b, "export %s='%s'\n", s.Name, strings.ReplaceAll(s.Value, "'", `'\''`))
			}
		}
	}
	return b.String()
}
