// Package measure is what the measuring make targets share: it runs alternatives interleaved, so that a noisy machine
// treats them alike, and reports rows as a table and as out/<target>.json.
package measure

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Alternative is one way of doing what is measured.
type Alternative struct {
	Name string
	// Run does it once and returns how long that took, by its own clock: set-up and checks do not count.
	Run func(context.Context) (time.Duration, error)
}

// Sample is what the repeats of one alternative took.
type Sample struct {
	Name  string
	Times []time.Duration
}

// Interleave runs each alternative once per repeat, every repeat beginning with another one. It stops at the first error
// and when ctx ends. The samples are in the order of the alternatives.
func Interleave(ctx context.Context, repeats int, alternatives ...Alternative) ([]Sample, error) {
	if repeats < 1 || len(alternatives) == 0 {
		return nil, fmt.Errorf("measure: %d repeats of %d alternatives", repeats, len(alternatives))
	}
	samples := make([]Sample, len(alternatives))
	for i, a := range alternatives {
		samples[i].Name = a.Name
	}
	for r := range repeats {
		for k := range alternatives {
			i := (r + k) % len(alternatives)
			if err := context.Cause(ctx); err != nil {
				return nil, fmt.Errorf("measure %s, repeat %d: %w", alternatives[i].Name, r+1, err)
			}
			took, err := alternatives[i].Run(ctx)
			if err == nil && took <= 0 {
				err = errors.New("it took no time, so nothing was measured")
			}
			if err != nil {
				return nil, fmt.Errorf("measure %s, repeat %d: %w", alternatives[i].Name, r+1, err)
			}
			samples[i].Times = append(samples[i].Times, took)
		}
	}
	return samples, nil
}

// Min is the shortest time, which other load on the machine disturbed least.
func (s Sample) Min() time.Duration { return slices.Min(s.Times) }

// Median is the time that half of the repeats did not exceed.
func (s Sample) Median() time.Duration {
	return slices.Sorted(slices.Values(s.Times))[(len(s.Times)-1)/2]
}

// Spread is (max-min)/min: how much the machine disturbed the repeats.
func (s Sample) Spread() float64 {
	least := s.Min()
	return float64(slices.Max(s.Times)-least) / float64(least)
}

// GBs is the rate of the shortest repeat in GB/s (10^9 bytes) when each moved that many bytes.
func (s Sample) GBs(bytes int) float64 { return float64(bytes) / float64(s.Min().Nanoseconds()) }
