package shape

import (
	"fmt"
	"slices"
)

// All are the shapes that are served, each pair of 1, 2 and 4 ranks among them.
func All() (out []*Shape) {
	add := func(name string, s Shape) {
		s.Name = name
		out = append(out, &s)
	}
	side := func(tp, tokens, perLogical, blocks int) Side {
		return Side{TP: tp, BlockTokens: tokens, PerLogical: perLogical, Blocks: blocks}
	}
	three := make([]Layer, 3)
	latent := []Layer{{Replicated: true}, {Replicated: true}}
	for _, p := range []int{1, 2, 4} {
		for _, d := range []int{1, 2, 4} {
			add(fmt.Sprintf("tp %d to %d", p, d), Shape{Heads: 4, Layout: "LBHNC", Layers: three, Owner: side(p, 8, 1, 113), Reader: side(d, 8, 1, 211), Tokens: 70})
			add(fmt.Sprintf("tp %d to %d, replicated", p, d), Shape{Layout: "LBHNC", Layers: latent, Owner: side(p, 8, 1, 30), Reader: side(d, 8, 1, 30), Tokens: 70, Cached: 2})
			if p != d {
				add(fmt.Sprintf("tp %d to %d, 2 heads", p, d), Shape{Heads: 2, Layout: "LBHNC", Layers: three, Owner: side(p, 8, 1, 30), Reader: side(d, 8, 1, 40), Tokens: 70, Cached: 1})
				add(fmt.Sprintf("tp %d to %d, one head", p, d), Shape{Heads: 1, Layout: "LBNHC", Layers: three, Owner: side(p, 8, 1, 30), Reader: side(d, 8, 1, 30), Tokens: 9})
			}
		}
	}
	mixed := []Layer{{}, {Replicated: true}, {}}
	add("tp 4 to 2, split and replicated layers", Shape{Heads: 4, Layout: "LBHNC", Layers: mixed, Owner: side(4, 8, 1, 30), Reader: side(2, 8, 1, 30), Tokens: 70})
	add("tp 1 to 2, split and replicated layers", Shape{Heads: 4, Layout: "LBHNC", Layers: mixed, Owner: side(1, 8, 1, 30), Reader: side(2, 8, 1, 30), Tokens: 70})
	add("tp 2 to 4, rows of all layers", Shape{Heads: 8, Layout: "BLHNC", Layers: three, Owner: side(2, 8, 1, 30), Reader: side(4, 8, 1, 30), Tokens: 70})
	add("tp 2 to 1, blocks 4 to 16", Shape{Heads: 4, Layout: "LBHNC", Layers: three, Owner: side(2, 4, 1, 60), Reader: side(1, 16, 1, 30), Tokens: 70, Cached: 1})
	add("tp 1 to 2, blocks 4 to 16", Shape{Heads: 4, Layout: "LBHNC", Layers: three, Owner: side(1, 4, 1, 60), Reader: side(2, 16, 1, 30), Tokens: 70, Cached: 2})
	add("blocks 4 to 16, tokens outside", Shape{Heads: 4, Layout: "LBNHC", Layers: three, Owner: side(1, 4, 1, 60), Reader: side(1, 16, 1, 30), Tokens: 42, Cached: 1})
	add("tp 4 to 1, replicated, blocks 4 to 16", Shape{Layout: "LBHNC", Layers: latent, Owner: side(4, 4, 1, 60), Reader: side(1, 16, 1, 30), Tokens: 42, Cached: 1})
	add("blocks 16 to 4", Shape{Heads: 2, Layout: "LBHNC", Layers: three, Owner: side(1, 16, 1, 30), Reader: side(1, 4, 1, 60), Tokens: 46})
	add("2 kernel blocks there, 3 here", Shape{Heads: 2, Layout: "LBHNC", Layers: three, Owner: side(1, 4, 2, 30), Reader: side(1, 8, 3, 30), Tokens: 70, Cached: 1})
	add("tp 2 to 1, 4 kernel blocks there, 2 here", Shape{Heads: 2, Layout: "LBHNC", Layers: three, Owner: side(2, 4, 4, 30), Reader: side(1, 8, 2, 30), Tokens: 70, Cached: 1})
	window := []int{0, 24}
	add("tp 2 to 1, two groups", Shape{Heads: 4, Layout: "LBHNC", Layers: []Layer{{}, {Group: 1}, {}, {Group: 1}}, Windows: window, Owner: side(2, 8, 1, 60), Reader: side(1, 8, 1, 60), Tokens: 70, Cached: 2})
	add("tp 1 to 2, two groups that share layers", Shape{Heads: 4, Layout: "LBHNC", Layers: []Layer{{Group: -1}, {Group: -1}, {}}, Windows: window, Owner: side(1, 8, 1, 60), Reader: side(2, 8, 1, 60), Tokens: 70, Cached: 1})
	add("two groups that share all layers, 2 kernel blocks", Shape{Heads: 4, Layout: "LBHNC", Layers: []Layer{{Group: -1}, {Group: -1}}, Windows: window, Owner: side(1, 8, 2, 60), Reader: side(1, 8, 2, 60), Tokens: 70})
	unverified := side(1, 8, 1, 30)
	unverified.VerifyNothing = true
	add("tp 4 to 1, not verified", Shape{Heads: 4, Layout: "LBHNC", Layers: three, Owner: side(4, 8, 1, 30), Reader: unverified, Tokens: 70})
	return out
}

// Named is one of All, nil when there is none of that name.
func Named(name string) *Shape {
	all := All()
	if i := slices.IndexFunc(all, func(s *Shape) bool { return s.Name == name }); i >= 0 {
		return all[i]
	}
	return nil
}
