// Package testdata carries the KV-cache dump of a real model that the demo passes by default. README.md says how it was made.
package testdata

import _ "embed"

// KV is the raw KV cache of a prompt: region after region, block after block.
//
//go:embed kv/tiny-llama.kv
var KV []byte
