package lease

// fault names defects that tests switch on to show that they would notice them.
// The names are those of lease/spec. Outside builds with the tag leasefaults
// the switch is the constant zero, and the compiler removes every use of it.
type fault uint32

const (
	faultM1       fault = 1 << iota // the slot is zeroed after the life was reported
	faultM2                         // the slots are read while block READs are active
	faultM3                         // a slot keeps its nonce over lives
	faultM4                         // the slot of one rank only is compared
	faultM5                         // blocks are freed at the first report
	faultM6                         // a read-complete without nonce ends a life in prefill
	faultM8                         // a renewal revives an ended lease
	faultM9B                        // the slot is given out again at the first report
	faultXNZ                        // any value but 0 passes the check
	faultXABSLOT                    // an abort returns the slot at once
	faultXGRANT                     // a grant revives a life that a read-complete ended
	faultXCNT                       // messages are counted, not senders
	faultXEARLY                     // params are built from the first block table
	faultXZOMBIE                    // a request is pulled again over its own active READ
	faultXSEEN                      // senders are kept per id, over lives
	faultXJOIN                      // a request joins a slot READ that is already posted
	faultXREAP                      // a deadline that was renewed is reaped all the same
	faultXSHORT                     // a renewal can shorten a deadline
	faultXBEAT                      // the first of two requests to end stops both heartbeats
	faultXRELEASE                   // the owner is released while a READ is active
)
