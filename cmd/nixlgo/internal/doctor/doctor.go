// Package doctor examines what NIXL needs of this machine, says what is wrong, and what to set.
//
// The parent process looks at the environment, the limits and the devices. It never loads the library: a child process
// does (see Loopback), so that a library that crashes or hangs is a finding too, and so that whatever C prints stays
// apart from the report.
package doctor

// Status is the verdict of a finding.
type Status string

// The verdicts. Only Fail makes the command fail.
const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "fail"
)

// Finding is the result of one check.
type Finding struct {
	Name   string `json:"name"` // of the check, or of the environment variable
	Status Status `json:"status"`
	Value  string `json:"value"`  // as found
	Cause  string `json:"cause"`  // why it is so, or what follows from it
	Remedy string `json:"remedy"` // what to do; "" when nothing is wrong
}

// Findings returns what can be said without the library, in the order of the report.
func (h *Host) Findings() []Finding {
	devices, err := readDevices(h.FS)
	found := append(h.checkEnv(devices), checkDevices(devices, err)...)
	return append(found, h.checkMemLock(usable(devices)), h.checkOpenFiles(), h.checkShm(), h.checkCopy())
}
