package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nixlgo/nixlgo/lease"
)

// What a flag takes is checked before anything is opened, started or asked: a wrong value is a usageError that names the flag
// and what it takes.

// flagError says of a value that is none of the flag's type what the flag takes, in place of what Go's parser says.
func flagError(cmd *cobra.Command, err error) error {
	if bad, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		flag := bad.GetFlag()
		want := map[string]string{"int": "a whole number", "int64": "a whole number", "uint64": "a whole number that is not negative", "float64": "a number",
			"duration": "a duration such as 500ms, 30s or 2m", "bool": "true or false"}[flag.Value.Type()]
		switch {
		case want == "":
			err = fmt.Errorf("--%s %q: %w", flag.Name, bad.GetValue(), bad.Unwrap())
		case errors.Is(bad.Unwrap(), strconv.ErrRange):
			err = fmt.Errorf("--%s %q: want %s of at most 64 bits", flag.Name, bad.GetValue(), want)
		default:
			err = fmt.Errorf("--%s %q: want %s", flag.Name, bad.GetValue(), want)
		}
	}
	return usageError{fmt.Errorf("%w (see %s --help)", err, cmd.CommandPath())}
}

// bound is the value of a flag and the least and the most that it takes.
type bound struct {
	flag            string
	value, min, max int
}

func checkBounds(bounds ...bound) error {
	for _, b := range bounds {
		if b.value < b.min || b.value > b.max {
			return fmt.Errorf("--%s %d is not in %d…%d", b.flag, b.value, b.min, b.max)
		}
	}
	return nil
}

// checkLease refuses what is no life of a lease.
func checkLease(d time.Duration) error {
	if d < time.Millisecond || d > lease.MaxTTL {
		return fmt.Errorf("--lease %v is not in %v…%v", d, time.Millisecond, lease.MaxTTL)
	}
	return nil
}

// hostName is what DNS and /etc/hosts can know.
var hostName = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?$`)

// checkHost refuses what is neither an IP address nor a name.
func checkHost(host string) error {
	if _, err := netip.ParseAddr(host); err == nil {
		return nil
	}
	if !hostName.MatchString(host) || strings.Trim(host, "0123456789.") == "" { // 10.0.0.300 is no name
		return fmt.Errorf("%q is no host: want an IP address or a name", host)
	}
	return nil
}

// checkListen refuses what cannot be listened on: HOST:PORT, of which the host may be missing, for every address of the
// machine, and the port 0, for any free one.
func checkListen(address string) error { return checkAddress(address, true, "127.0.0.1:8300") }

// checkConnect refuses what cannot be connected to.
func checkConnect(address string) error { return checkAddress(address, false, "10.0.0.7:8300") }

func checkAddress(address string, own bool, example string) error {
	host, port, err := net.SplitHostPort(address)
	if err == nil && !(own && host == "") {
		err = checkHost(host)
	}
	least := 1
	if own {
		least = 0
	}
	if err == nil {
		err = checkPort(port, least)
	}
	if err != nil {
		return fmt.Errorf("%w, want HOST:PORT such as %s", err, example)
	}
	return nil
}

func checkPort(port string, least int) error {
	if n, err := strconv.Atoi(port); err != nil || n < least || n > 65535 || port[0] == '+' {
		return fmt.Errorf("%q is no port of %d to 65535", port, least)
	}
	return nil
}

// checkURL refuses what is no URL of an HTTP server.
func checkURL(s string) error {
	u, err := url.Parse(s)
	bad := err != nil || u.Scheme != "http" && u.Scheme != "https" || checkHost(u.Hostname()) != nil
	if !bad && u.Port() == "" {
		bad = strings.HasSuffix(u.Host, ":")
	} else if !bad {
		bad = checkPort(u.Port(), 1) != nil
	}
	if bad {
		return fmt.Errorf("%q is no URL: want http://HOST:PORT", s)
	}
	return nil
}
