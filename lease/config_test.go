package lease

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Specification, "Configuration".
func TestDefaultsAreThoseOfTheSpecification(t *testing.T) {
	for _, data := range []string{"", "{}", `{"kv_lease_duration": null}`, `{"kv_connector": "NixlConnector", "kv_connector_extra_config": {}}`} {
		c, err := ParseConfig([]byte(data))
		require.NoError(t, err, data)
		require.Equal(t, DefaultConfig(), c, data)
	}
	c := DefaultConfig()
	require.Equal(t, 30*time.Second, c.Duration)
	require.Equal(t, 480*time.Second, c.DecoderTTL)
	require.Equal(t, VerifyAll, c.Verification)
	require.Equal(t, FailRequest, c.FailurePolicy)
	require.Equal(t, 1000+256, c.slots(1000, 256), "kv_lease_slots defaults to KV blocks + max_num_seqs")
	require.NoError(t, c.Validate())
}

// "interval = duration // 6, extension = duration * 2 // 3"; A1.7. vllm-wire.md
// 9.15: whole seconds make both zero for short durations, which is no use.
func TestIntervalAndExtensionAreDerivedFromTheDuration(t *testing.T) {
	for _, tt := range []struct{ duration, interval, extension time.Duration }{
		{30 * time.Second, 5 * time.Second, 20 * time.Second},
		{60 * time.Second, 10 * time.Second, 40 * time.Second},
		{20 * time.Second, 3 * time.Second, 13 * time.Second},
		{6 * time.Second, time.Second, 4 * time.Second},
		{5 * time.Second, 5 * time.Second / 6, 3 * time.Second},
		{time.Second, time.Second / 6, time.Second * 2 / 3},
		{300 * time.Millisecond, 50 * time.Millisecond, 200 * time.Millisecond},
	} {
		c := Config{Duration: tt.duration}
		require.Equal(t, tt.interval, c.Interval(), tt.duration)
		require.Equal(t, tt.extension, c.Extension(), tt.duration)
		require.Less(t, c.Interval(), c.Extension(), "a lease must outlive the interval")
	}
}

func TestParseConfigReadsEveryKey(t *testing.T) {
	c, err := ParseConfig([]byte(`{
		"kv_connector": "NixlConnector", "kv_role": "kv_producer", "engine_ttl": 600.0, "num_threads": 4,
		"kv_load_failure_policy": "recompute",
		"kv_connector_extra_config": {
			"kv_lease_duration": 60, "decoder_kv_blocks_ttl": "120", "kv_lease_verification": false, "kv_lease_slots": 512.0,
			"kv_lease_max_notification": 256, "kv_lease_max_life": 3600, "bidirectional_kv_xfer": true, "kv_recompute_threshold": 0, "backends": ["UCX"]}}`))
	require.NoError(t, err)
	require.Equal(t, Config{
		Duration: time.Minute, DecoderTTL: 2 * time.Minute, Verification: VerifyNone, Slots: 512, MaxNotification: 256,
		MaxLife: time.Hour, FailurePolicy: Recompute, Bidirectional: true, EngineTTL: 10 * time.Minute,
	}, c)
	c, err = ParseConfig([]byte(`{"engine_ttl": 0}`))
	require.NoError(t, err)
	require.Zero(t, c.EngineTTL)
}

// The opposite of verification must not be confused with its absence, in a file or in a literal.
func TestVerificationFalseIsNotAbsent(t *testing.T) {
	for data, want := range map[string]Verification{`{}`: VerifyAll, `{"kv_lease_verification": true}`: VerifyAll,
		`{"kv_lease_verification": "offered"}`: VerifyOffered, `{"kv_lease_verification": false}`: VerifyNone} {
		c, err := ParseConfig([]byte(data))
		require.NoError(t, err)
		require.Equal(t, want, c.Verification, data)
	}
	require.Equal(t, VerifyAll, Config{Duration: time.Second}.Verification)
}

func TestParseConfigRefuses(t *testing.T) {
	for _, tt := range []struct{ name, data, says string }{
		{"no JSON", `{`, "JSON object"},
		{"no object", `[1]`, "JSON object"},
		{"zero duration", `{"kv_lease_duration": 0}`, "kv_lease_duration is 0"},
		{"negative duration", `{"kv_lease_duration": -5}`, "kv_lease_duration is -5"},
		{"fractional duration", `{"kv_lease_duration": 0.5}`, "whole number"},
		{"duration in the wrong unit", `{"kv_lease_duration": 30000000000}`, "kv_lease_duration"},
		{"duration as text", `{"kv_lease_duration": "30s"}`, "whole number"},
		{"no slots", `{"kv_lease_slots": 0}`, "kv_lease_slots is 0"},
		{"verification as text", `{"kv_lease_verification": "yes"}`, `true, false or "offered"`},
		{"unknown policy", `{"kv_load_failure_policy": "retry"}`, "retry"},
		{"policy as number", `{"kv_load_failure_policy": 1}`, "recompute"},
		{"tiny notifications", `{"kv_lease_max_notification": 8}`, "of 64 to"},
		{"life shorter than the lease", `{"kv_lease_max_life": 10}`, "kv_lease_max_life"},
		{"negative time to live", `{"engine_ttl": -1}`, "engine_ttl is -1"},
		{"misspelt", `{"kv_lease_druation": 60}`, `"kv_lease_duration"`},
		{"misspelt far", `{"decoder_kv_block_ttl": 60}`, `"decoder_kv_blocks_ttl"`},
		{"looks like ours", `{"kv_lease_time": 60}`, "kv_lease_"},
		{"other case", `{"KV_LEASE_SLOTS": 60}`, `"kv_lease_slots"`},
		{"inner object", `{"kv_connector_extra_config": 5}`, "kv_connector_extra_config"},
		{"inner key", `{"kv_connector_extra_config": {"kv_lease_slot": 5}}`, `"kv_lease_slots"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := ParseConfig([]byte(tt.data))
			requireRefused(t, err, ErrInvalid)
			require.Zero(t, c)
			require.ErrorContains(t, err, tt.says)
		})
	}
}

// Keys of other parts of the connector are not ours to refuse.
func TestParseConfigLeavesOtherKeysAlone(t *testing.T) {
	_, err := ParseConfig([]byte(`{"enforce_handshake_compat": false, "kv_recompute_threshold": 64, "num_threads": 4, "backends": [], "x": {}}`))
	require.NoError(t, err)
}

func TestValidateNamesTheField(t *testing.T) {
	for says, change := range map[string]func(*Config){
		keyDuration:        func(c *Config) { c.Duration = 0 },
		keyDecoderTTL:      func(c *Config) { c.DecoderTTL = MaxTTL + 1 },
		keyMaxLife:         func(c *Config) { c.MaxLife = time.Second },
		keySlots:           func(c *Config) { c.Slots = -2 },
		keyMaxNotification: func(c *Config) { c.MaxNotification = 3 },
		keyThreshold:       func(c *Config) { c.RecomputeThreshold = -1 },
		keyPolicy:          func(c *Config) { c.FailurePolicy = 9 },
		keyEngineTTL:       func(c *Config) { c.EngineTTL = -1 },
	} {
		c := DefaultConfig()
		change(&c)
		err := c.Validate()
		requireRefused(t, err, ErrInvalid)
		require.ErrorContains(t, err, says)
	}
	c := DefaultConfig()
	c.Slots, c.Duration = NoSlot, 300*time.Millisecond
	require.NoError(t, c.Validate(), "no slots and less than a second are fine through Go")
	require.Zero(t, c.slots(100, 10))
}

func FuzzParseConfig(f *testing.F) {
	for _, s := range []string{`{}`, `{"kv_lease_duration": 60}`, `{"kv_connector_extra_config": {"kv_lease_slots": "5"}}`,
		`{"kv_lease_duration": 1e3}`, `null`, `{"kv_lease": {}}`, strings.Repeat("[", 100)} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := ParseConfig(data)
		if err == nil {
			require.NoError(t, c.Validate())
			require.Positive(t, c.Interval())
			require.Less(t, c.Interval(), c.Extension())
		}
	})
}
