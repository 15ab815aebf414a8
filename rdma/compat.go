package rdma

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf16"
)

// Compatibility holds the twelve facts that vLLM's NixlConnector hashes: two engines whose facts differ do not exchange KV
// blocks. Keys and encoding are those of connector versions 14 (vLLM 0.32.0) and 15 (0.33.0).
type Compatibility struct {
	Attention        string          `json:"attn_backend_name"`      // CPU_ATTN, FLASH_ATTN, …
	CacheDtype       string          `json:"cache_dtype"`            // usually auto
	Dtype            string          `json:"dtype"`                  // torch.bfloat16
	HeadSize         int             `json:"head_size"`              // elements
	HMA              bool            `json:"is_hma_enabled"`         // hybrid memory allocator; normally true
	Model            string          `json:"model"`                  // exactly as vLLM holds it: name or snapshot path
	ConnectorVersion int             `json:"nixl_connector_version"` // 14, 15
	Layers           int             `json:"num_hidden_layers"`
	KVHeads          int             `json:"num_kv_heads"`       // of the whole model
	Speculative      json.RawMessage `json:"speculative_config"` // null without speculative decoding
	TransferMode     string          `json:"transfer_mode"`      // pull
	VLLMVersion      string          `json:"vllm_version"`
}

// Hash returns the hex SHA-256 of c as vLLM computes it: over Python's json.dumps with sorted keys.
func (c Compatibility) Hash() (string, error) {
	if c.Speculative == nil {
		c.Speculative = json.RawMessage("null")
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(c); err != nil {
		return "", fmt.Errorf("compatibility hash: %w", err)
	}
	d := json.NewDecoder(&b)
	d.UseNumber() // a float64 would change the digits
	var facts map[string]any
	if err := d.Decode(&facts); err != nil {
		return "", fmt.Errorf("compatibility hash: %w", err)
	}
	text, err := pythonJSON(facts)
	if err != nil {
		return "", fmt.Errorf("compatibility hash: %w", err)
	}
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:]), nil
}

// pythonJSON writes v as json.dumps(sort_keys=True) does: ", " and ": " between items, non-ASCII escaped.
func pythonJSON(v any) (string, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return "", err
	}
	var out strings.Builder
	inString, escaped := false, false
	for _, r := range strings.TrimSuffix(b.String(), "\n") {
		switch {
		case r > 0xffff:
			hi, lo := utf16.EncodeRune(r)
			fmt.Fprintf(&out, `\u%04x\u%04x`, hi, lo)
		case r > 0x7e:
			fmt.Fprintf(&out, `\u%04x`, r)
		default:
			out.WriteRune(r)
		}
		switch {
		case escaped:
			escaped = false
		case inString && r == '\\':
			escaped = true
		case r == '"':
			inString = !inString
		case !inString && (r == ',' || r == ':'):
			out.WriteByte(' ')
		}
	}
	return out.String(), nil
}
