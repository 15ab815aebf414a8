//go:build !cgo

package nixl

import "errors"

// Without cgo the package compiles, and Load answers an error that says so. No
// agent can exist then, so none of the calls below is ever reached.

type handle = uint64

const noCgo = "this program was built without cgo: build it with CGO_ENABLED=1 and a C compiler"

func rawLoad(string) (int, string)  { return notOpened, noCgo }
func functionName(int) string       { return "" }
func rawMap(int) ([]byte, error)    { return nil, errors.New(noCgo) }
func rawUnmap([]byte) error         { return nil }
func rawMissing() []string          { return nil }
func rawAgentDestroy(handle) Status { return statusLacks }

func rawAgentCreate([]byte, bool, int, uint64, uint64, bool) (handle, Status) { return 0, statusLacks }

func rawPlugins(handle) ([]string, Status)                          { return nil, statusLacks }
func rawPluginParams(handle, []byte) ([]string, uint64, Status)     { return nil, 0, statusLacks }
func rawBackendParams(handle, handle) ([]string, uint64, Status)    { return nil, 0, statusLacks }
func rawBackendCreate(handle, []byte, []byte, int) (handle, Status) { return 0, statusLacks }
func rawBackendDestroy(handle) Status                               { return statusLacks }
func rawRegister(handle, *region) Status                            { return statusLacks }
func rawDeregister(handle, *region) Status                          { return statusLacks }
func rawLocalMetadata(handle) ([]byte, Status)                      { return nil, statusLacks }
func rawLoadMetadata(handle, []byte) (string, Status)               { return "", statusLacks }
func rawInvalidate(handle, []byte) Status                           { return statusLacks }
func rawCheck(handle, []byte, MemType, []Desc) Status               { return statusLacks }
func rawConnect(handle, []byte, handle) Status                      { return statusLacks }
func rawPrepare(handle, []byte, MemType, []Desc) (handle, Status)   { return 0, statusLacks }
func rawListRelease(handle, handle) Status                          { return statusLacks }

func rawMake(handle, Op, *list, []int32, *list, []int32, *rawOptions, bool) pollItem {
	return pollItem{made: int32(statusLacks)}
}

func rawPost(handle, *pollItem) Status                { return statusLacks }
func rawPoll(handle, []pollItem)                      {}
func rawRelease(handle, handle) Status                { return statusLacks }
func rawNotify(handle, []byte, []byte, handle) Status { return statusLacks }

func rawEstimate(handle, handle) (int64, int64, Status) { return 0, 0, statusLacks }

type rawOptions struct {
	message, custom []byte
	notify, noMerge bool
	backend         handle
}

func rawCreate(handle, Op, MemType, []Desc, MemType, []Desc, []byte, *rawOptions) (handle, Status) {
	return 0, statusLacks
}

func rawPartialMetadata(handle, MemType, []Desc) ([]byte, Status)           { return nil, statusLacks }
func rawSendMetadata(handle, []byte, uint16) Status                         { return statusLacks }
func rawSendPartialMetadata(handle, MemType, []Desc, []byte, uint16) Status { return statusLacks }
func rawFetchMetadata(handle, []byte, []byte, uint16) Status                { return statusLacks }
func rawInvalidateLocal(handle, []byte, uint16) Status                      { return statusLacks }
func rawQuery(handle, handle, MemType, []Desc, []byte) ([]string, Status)   { return nil, statusLacks }
func rawTelemetry(handle, handle) (rawTimes, Status)                        { return rawTimes{}, statusLacks }
func rawTransferBackend(handle, handle) ([]string, uint64, Status)          { return nil, 0, statusLacks }
func rawViewLocal(handle, MemType, []Desc, *rawOptions) (handle, Status)    { return 0, statusLacks }
func rawViewRemote(handle, MemType, []Desc, []byte, *rawOptions) (handle, Status) {
	return 0, statusLacks
}
func rawViewRelease(handle, handle) Status { return statusLacks }

func rawDevice(uint64) (pointerInfo, error) { return pointerInfo{}, errors.New(noCgo) }

type inbox struct{}

func (*inbox) open() Status                            { return statusLacks }
func (*inbox) drain(handle, handle) (int, int, Status) { return 0, 0, statusLacks }
func (*inbox) messages() []message                     { return nil }
func (*inbox) clear() Status                           { return statusLacks }
func (*inbox) close()                                  {}

type message struct{ from *byte }

func (*message) sender() []byte  { return nil }
func (*message) payload() []byte { return nil }
