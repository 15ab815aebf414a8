package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"github.com/nixlgo/nixlgo/lease/kvparams"
)

// statusError is an answer that is no 200.
type statusError struct {
	status  int
	message string
}

func (e *statusError) Error() string { return fmt.Sprintf("HTTP %d: %s", e.status, e.message) }

// request sends JSON, or nothing, and returns the body of a 200. Other answers are a *statusError. id, unless empty, is the
// request's id for engines.
func request(ctx context.Context, method, url string, body []byte, id string) ([]byte, error) {
	q, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	q.Header.Set("Content-Type", "application/json")
	if id != "" {
		q.Header.Set(kvparams.HeaderRequestID, id)
	}
	resp, err := http.DefaultClient.Do(q)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, kvparams.MaxCapture))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = &statusError{resp.StatusCode, cmp.Or(refusalText(text), fmt.Sprintf("%.200s", bytes.TrimSpace(text)), http.StatusText(resp.StatusCode))}
	}
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, url, err)
	}
	return text, nil
}

// refusalText is the text in an error that is {"error": "…"}, or {"error": {"message": "…"}} as OpenAI has it.
func refusalText(body []byte) string {
	var said struct{ Error json.RawMessage }
	var object struct{ Message string }
	var text string
	if json.Unmarshal(body, &said) == nil && json.Unmarshal(said.Error, &text) != nil {
		_ = json.Unmarshal(said.Error, &object) // else it says nothing that is understood
	}
	return cmp.Or(text, object.Message)
}
