package lease

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// FailurePolicy is kv_load_failure_policy: what becomes of a request whose KV
// load failed.
type FailurePolicy uint8

const (
	// FailRequest ends the request with an error. It is the default.
	FailRequest FailurePolicy = iota
	// Recompute prefills the request locally.
	Recompute
)

var policyNames = [...]string{"fail", "recompute"}

func (p FailurePolicy) String() string { return nameOf(policyNames[:], int(p)) }

// MarshalText writes "fail" or "recompute".
func (p FailurePolicy) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads "fail" or "recompute".
func (p *FailurePolicy) UnmarshalText(b []byte) error {
	i, err := indexOf(policyNames[:], keyPolicy, b)
	if err == nil {
		*p = FailurePolicy(i)
	}
	return err
}

// Verification says which pulls are verified. Those that are use their blocks
// only after the check.
type Verification uint8

const (
	// VerifyAll fails a pull without lease fields. It is the zero value, and true
	// in a configuration. Only a readback is excepted, whose owner need not offer it.
	VerifyAll Verification = iota
	// VerifyOffered verifies the pulls whose parameters carry a lease and reads the
	// others without, for a reader whose owners have slots or have none, as vLLM's
	// up to 0.33. A router that drops the fields turns the check off. It is
	// "offered" in a configuration, which vLLM does not know.
	VerifyOffered
	// VerifyNone reads without. It is false in a configuration.
	VerifyNone
)

var verificationNames = [...]string{"true", "offered", "false"}

// String is the value in a configuration.
func (v Verification) String() string { return nameOf(verificationNames[:], int(v)) }

// verifies reports whether a pull with these parameters is verified.
func (v Verification) verifies(offered, readback bool) bool {
	return v == VerifyAll && !readback || v != VerifyNone && offered
}

// MaxTTL bounds every duration: longer leases are refused, so that a value in
// the wrong unit is an error and not blocks that never come back.
const MaxTTL = 30 * 24 * time.Hour

// Config is the lease part of kv_connector_extra_config (specification,
// "Configuration"). Start from DefaultConfig: the zero value has no duration.
type Config struct {
	// Duration is kv_lease_duration, the life of a lease that nobody renews.
	Duration time.Duration
	// DecoderTTL is decoder_kv_blocks_ttl, the life of a lease on blocks that a
	// decoder keeps for the next turn. Heartbeats do not renew it.
	DecoderTTL time.Duration
	// Verification is kv_lease_verification.
	Verification Verification
	// Slots is kv_lease_slots, the size of the slot array. 0 means KV blocks +
	// max_num_seqs. NoSlot means none: no request of this owner can be verified.
	Slots int
	// MaxNotification is the size cap of one notification in bytes, 0 means
	// DefaultMaxNotification. Some NIXL backends drop what is too long for them.
	MaxNotification int
	// MaxLife bounds the time from grant to the last moment a heartbeat can
	// renew to. 0 means no bound.
	MaxLife time.Duration
	// FailurePolicy is kv_load_failure_policy.
	FailurePolicy FailurePolicy
	// Bidirectional is bidirectional_kv_xfer: finished decode requests keep
	// their blocks for DecoderTTL, and prefill requests may read them back.
	Bidirectional bool
	// RecomputeThreshold is kv_recompute_threshold: a readback of fewer tokens is
	// not worth its while. 0 reads back any number.
	RecomputeThreshold int
	// EngineTTL is engine_ttl: an engine that nothing was read from, renewed at or
	// told for so long, and for two heartbeat intervals, is forgotten, and connected
	// to anew when it is used again. 0 keeps it until its connection fails.
	EngineTTL time.Duration
}

// DefaultConfig has the defaults of the specification.
func DefaultConfig() Config {
	return Config{
		Duration:        30 * time.Second,
		DecoderTTL:      480 * time.Second,
		MaxNotification: DefaultMaxNotification,

		RecomputeThreshold: 64,
		EngineTTL:          time.Hour,
	}
}

// Interval is the time between two heartbeats to one peer: Duration / 6, in
// whole seconds for a Duration of whole seconds as in vLLM (30 s → 5 s), but
// exact where that would be zero.
func (c Config) Interval() time.Duration { return share(c.Duration, 1, 6) }

// Extension is how far from now a heartbeat moves a deadline: Duration * 2/3,
// rounded like Interval (30 s → 20 s).
func (c Config) Extension() time.Duration { return share(c.Duration, 2, 3) }

func share(d, num, den time.Duration) time.Duration {
	if d%time.Second == 0 {
		if whole := d / time.Second * num / den * time.Second; whole > 0 {
			return whole
		}
	}
	return d * num / den
}

// Validate says which field is wrong and what it may be.
func (c Config) Validate() error {
	for _, d := range []struct {
		key      string
		value    time.Duration
		min, max time.Duration
	}{
		{keyDuration, c.Duration, time.Millisecond, MaxTTL},
		{keyDecoderTTL, c.DecoderTTL, time.Millisecond, MaxTTL},
		{keyMaxLife, c.MaxLife, 0, math.MaxInt64},
		{keyEngineTTL, c.EngineTTL, 0, MaxTTL},
	} {
		if d.value < d.min || d.value > d.max {
			return invalid("config", "", "%s is %v, must be %v to %v (start from DefaultConfig)", d.key, d.value, d.min, d.max)
		}
	}
	switch {
	case c.MaxLife != 0 && c.MaxLife < c.Duration:
		return invalid("config", "", "%s is %v, less than the %v of %s", keyMaxLife, c.MaxLife, c.Duration, keyDuration)
	case c.Slots < NoSlot || c.Slots > math.MaxInt32:
		return invalid("config", "", "%s is %d, must be positive, 0 for the default or -1 for none", keySlots, c.Slots)
	case c.MaxNotification != 0 && c.MaxNotification < minNotification:
		return invalid("config", "", "%s is %d bytes, must be at least %d", keyMaxNotification, c.MaxNotification, minNotification)
	case c.RecomputeThreshold < 0:
		return invalid("config", "", "%s is %d, must not be negative", keyThreshold, c.RecomputeThreshold)
	case int(c.Verification) >= len(verificationNames):
		return invalid("config", "", "%s is %d, must be VerifyAll, VerifyOffered or VerifyNone", keyVerification, c.Verification)
	case int(c.FailurePolicy) >= len(policyNames):
		return invalid("config", "", "%s is %d, must be fail or recompute", keyPolicy, c.FailurePolicy)
	}
	return nil
}

// slots is the size of the slot array of an engine.
func (c Config) slots(blocks, maxSeqs int) int {
	switch c.Slots {
	case NoSlot:
		return 0
	case 0:
		return blocks + maxSeqs
	}
	return c.Slots
}

// The keys this package reads.
const (
	keyDuration        = "kv_lease_duration"
	keyDecoderTTL      = "decoder_kv_blocks_ttl"
	keyVerification    = "kv_lease_verification"
	keySlots           = "kv_lease_slots"
	keyMaxNotification = "kv_lease_max_notification"
	keyMaxLife         = "kv_lease_max_life"
	keyPolicy          = "kv_load_failure_policy"
	keyBidirectional   = "bidirectional_kv_xfer"
	keyThreshold       = "kv_recompute_threshold"
	keyEngineTTL       = "engine_ttl"
	keyExtra           = "kv_connector_extra_config"
)

var configKeys = []string{keyDuration, keyDecoderTTL, keyVerification, keySlots, keyMaxNotification, keyMaxLife, keyPolicy, keyBidirectional, keyThreshold, keyEngineTTL}

// ParseConfig reads kv_connector_extra_config, or a whole --kv-transfer-config
// that holds one; what is absent or null keeps its default. Durations are whole
// seconds. kv_lease_max_notification (bytes) and kv_lease_max_life (seconds)
// are additions of this library.
//
// The object belongs to the whole connector, so keys of other parts are left
// alone; but a key that looks like one of ours and is none (kv_lease_time,
// kv_lease_slot) is refused with the nearest name, for a misspelt lease setting
// would otherwise silently be the default.
func ParseConfig(data []byte) (Config, error) {
	c := DefaultConfig()
	var object map[string]json.RawMessage
	if len(bytes.TrimSpace(data)) == 0 {
		return c, nil
	}
	if err := json.Unmarshal(data, &object); err != nil {
		return Config{}, &Error{Op: "parse config", Detail: "want a JSON object", Err: fmt.Errorf("%w: %w", ErrInvalid, err)}
	}
	if err := c.set(object); err != nil {
		return Config{}, err
	}
	if extra, ok := object[keyExtra]; ok {
		var inner map[string]json.RawMessage
		if err := json.Unmarshal(extra, &inner); err != nil {
			return Config{}, &Error{Op: "parse config", Detail: keyExtra + ": want a JSON object", Err: fmt.Errorf("%w: %w", ErrInvalid, err)}
		}
		if err := c.set(inner); err != nil {
			return Config{}, err
		}
	}
	if err := c.Validate(); err != nil {
		return Config{}, err
	}
	return c, nil
}

func (c *Config) set(object map[string]json.RawMessage) error {
	keys := make([]string, 0, len(object))
	for k := range object {
		keys = append(keys, k)
	}
	slices.Sort(keys) // the same error for the same object
	for _, k := range keys {
		v := object[k]
		if string(v) == "null" {
			continue
		}
		var err error
		switch k {
		case keyDuration:
			c.Duration, err = seconds(k, v)
		case keyDecoderTTL:
			c.DecoderTTL, err = seconds(k, v)
		case keyMaxLife:
			c.MaxLife, err = seconds(k, v)
		case keyEngineTTL:
			var n int
			n, err = integer(k, v, 0, int(MaxTTL/time.Second))
			c.EngineTTL = time.Duration(n) * time.Second
		case keyVerification:
			c.Verification, err = verification(k, v)
		case keyBidirectional:
			c.Bidirectional, err = boolean(k, v)
		case keyThreshold:
			c.RecomputeThreshold, err = integer(k, v, 0, math.MaxInt32)
		case keySlots:
			c.Slots, err = integer(k, v, 1, math.MaxInt32)
		case keyMaxNotification:
			c.MaxNotification, err = integer(k, v, minNotification, math.MaxInt32)
		case keyPolicy:
			var s string
			if err = json.Unmarshal(v, &s); err == nil {
				err = c.FailurePolicy.UnmarshalText([]byte(s))
			} else {
				err = invalid("parse config", "", "%s is %s, want \"fail\" or \"recompute\"", k, v)
			}
		default:
			if near := nearest(k); near != "" {
				err = invalid("parse config", "", "unknown key %q, do you mean %q?", k, near)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func seconds(key string, v json.RawMessage) (time.Duration, error) {
	n, err := integer(key, v, 1, int(MaxTTL/time.Second))
	return time.Duration(n) * time.Second, err
}

func integer(key string, v json.RawMessage, min, max int) (int, error) {
	n, err := parseInt(v)
	if err != nil || n < int64(min) || n > int64(max) {
		return 0, invalid("parse config", "", "%s is %.40s, want a whole number of %d to %d", key, v, min, max)
	}
	return int(n), nil
}

func boolean(key string, v json.RawMessage) (bool, error) {
	var b bool
	if err := json.Unmarshal(v, &b); err != nil {
		return false, invalid("parse config", "", "%s is %.40s, want true or false", key, v)
	}
	return b, nil
}

func verification(key string, v json.RawMessage) (Verification, error) {
	i := slices.Index(verificationNames[:], strings.Trim(string(v), `"`))
	if i < 0 || (i == int(VerifyOffered)) != (v[0] == '"') {
		return 0, invalid("parse config", "", "%s is %.40s, want true, false or \"offered\"", key, v)
	}
	return Verification(i), nil
}

// nearest is the key of ours that k is most like, "" when k is not about leases.
func nearest(k string) string {
	k = strings.ToLower(k)
	best, distance := "", math.MaxInt
	for _, ours := range configKeys {
		if d := editDistance(k, ours); d < distance {
			best, distance = ours, d
		}
	}
	if distance > 3 && !strings.Contains(k, "lease") {
		return ""
	}
	return best
}

// editDistance counts the single-byte insertions, deletions and changes from a
// to b. Long strings are cut: they are not misspelt keys.
func editDistance(a, b string) int {
	a, b = a[:min(len(a), 64)], b[:min(len(b), 64)]
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], cost
		}
	}
	return row[len(b)]
}
