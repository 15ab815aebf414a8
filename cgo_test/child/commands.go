package child

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"syscall"
)

// Commands are what a child is told, until in, its standard input, ends. The last one has the error if there is one.
func Commands[C any](in io.Reader) iter.Seq2[C, error] {
	return func(yield func(C, error) bool) {
		for d := json.NewDecoder(in); ; {
			var c C
			err := d.Decode(&c)
			if errors.Is(err, io.EOF) || !yield(c, err) || err != nil {
				return
			}
		}
	}
}

// Say tells the parent something. Several goroutines may speak at once: a line is one write.
func Say(message any) error { return json.NewEncoder(os.Stdout).Encode(message) }

// Exit ends this process, with code 1 and a line on standard error if err is not nil. It is the system call: code of the library
// and of the wheel's libnl that libc's exit runs crashes.
func Exit(name string, err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		syscall.Exit(1)
	}
	syscall.Exit(0)
}
