package kvparams

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestAnEditChangesOnlyItsMember(t *testing.T) {
	for _, tt := range []struct{ name, in, out string }{
		{"set", "{\"k\" :\t1 , \"z\":2}", "{\"k\" :\tV , \"z\":2}"},
		{"escaped key", `{"\u006b":1}`, `{"\u006b":V}`},
		{"append", "{\"z\":1.0e+2 \n}\n", "{\"z\":1.0e+2,\"k\":V \n}\n"},
		{"append to none", " { } ", ` {"k":V } `},
		{"only in nested", `{"a":{"k":1}}`, `{"a":{"k":1},"k":V}`},
	} {
		o, err := parseObject([]byte(tt.in))
		require.NoError(t, err, tt.name)
		require.Equal(t, tt.out, string(o.edit(set("k", "V"))), tt.name)
	}
	for _, tt := range []struct{ in, out string }{
		{`{"k":1}`, `{}`},
		{`{ "k":1, "b":2}`, `{ "b":2}`},
		{`{"a":1 , "k":[1,2] ,"b":3}`, `{"a":1 ,"b":3}`},
		{`{"a":1, "k":1 }`, `{"a":1 }`},
		{`{"a":1}`, `{"a":1}`},
	} {
		o, err := parseObject([]byte(tt.in))
		require.NoError(t, err)
		require.Equal(t, tt.out, string(o.edit(remove("k"))), tt.in)
		require.NotContains(t, string(o.edit(replace("absent", "1"))), "absent")
	}
	o, err := parseObject([]byte(`{"a":1,"b":2,"c":3}`))
	require.NoError(t, err)
	require.Equal(t, `{"n":0}`, string(o.edit(remove("a"), remove("b"), remove("c"), set("n", "0"))))
	require.Equal(t, `{"c":9,"n":0}`, string(o.edit(remove("a"), set("n", "0"), remove("b"), set("c", "9"))))
}

func TestWhatIsNoObjectIsRefusedWithItsPlace(t *testing.T) {
	deep := strings.Repeat(`{"a":[`, 100_000)
	for _, tt := range []struct{ in, text string }{
		{"", "found nothing"}, {" \n", "found nothing"},
		{"[]", `found '['`}, {"null", `found 'n'`}, {`"{}"`, `found '"'`},
		{"\ufeff{}", "want a JSON object"},
		{`{} {}`, "2 bytes follow the object, from byte 3 on"}, {`{}x`, "1 bytes follow"},
		{`{"a":1,"a":1}`, `key "a" comes twice, the second time at byte 7`},
		{`{"kv":1,"k\u0076":2}`, `key "kv" comes twice`},
		{`{"a":1,}`, "byte 7: found '}', want a key"},
		{`{"a" 1}`, "want ':'"}, {`{"a":[1,]}`, "want a value"}, {`{"a":1 "b":2}`, "want ',' or '}'"}, {`{"a":[1 2]}`, "want ',' or ']'"},
		{`{"a":`, "the text ends, want a value"}, {`{"a":1`, "the text ends"}, {`{`, "the text ends, want a key"},
		{`{"a":01}`, "byte 6"}, {`{"a":-}`, "want a digit"}, {`{"a":1.}`, "want a digit"}, {`{"a":1e+}`, "want a digit"}, {`{"a":.5}`, "want a value"},
		{`{"a":NaN}`, "want a value"}, {`{"a":-Infinity}`, "want a digit"}, {`{"a":tru}`, "want a value"}, {`{'a':1}`, "want a key"},
		{`{"a":"` + "\n" + `"}`, "control character"}, {`{"a":"\x"}`, "want an escape"}, {`{"a":"\u12g4"}`, "hexadecimal"}, {`{"a":"b`, "byte 5: the string does not end"},
		{`{"a":"\`, "the string does not end"}, {`{"a":"\u12`, "hexadecimal"},
		{"{\"a\":\"\xff\"}", "byte 6 is not UTF-8"},
		{deep, "nested deeper than 1000"}, {deep + strings.Repeat("]}", 100_000), "nested deeper than 1000"},
	} {
		_, err := parseObject([]byte(tt.in))
		require.ErrorContains(t, err, tt.text, "%.60s", tt.in)
	}
	ok := strings.Repeat(`[`, maxDepth-1)
	_, err := parseObject([]byte(`{"a":` + ok + strings.Repeat(`]`, maxDepth-1) + `}`))
	require.NoError(t, err)
}

// genValue draws JSON text with every freedom that the grammar gives.
func genValue(depth int) *rapid.Generator[string] {
	leaf := rapid.OneOf(
		rapid.SampledFrom([]string{"null", "true", "false", "0", "-0", "1.0", "1E400", "-2.50e-07", "12345678901234567890123", "9007199254740993",
			`""`, `"\ud83d\ude00"`, `"\ud800"`, `"\/"`, `"/"`, `"é"`, `"\u00e9"`, `"{\"a\":1}"`, `"],}"`, "\"\u2028\"", `"\u0000"`}),
		rapid.Map(rapid.String(), func(s string) string { return quote(s) }),
		rapid.Map(rapid.Float64(), func(f float64) string { b, _ := json.Marshal(f); return string(b) }),
	)
	if depth == 0 {
		return leaf
	}
	return rapid.OneOf(leaf, rapid.Custom(func(t *rapid.T) string {
		ws := func() string { return genSpace.Draw(t, "ws") }
		elements := rapid.SliceOfN(genValue(depth-1), 0, 4).Draw(t, "elements")
		object := rapid.Bool().Draw(t, "object")
		for i := range elements {
			elements[i] = ws() + elements[i] + ws()
			if object { // duplicates are allowed below the level that is edited
				elements[i] = ws() + genKey.Draw(t, "key") + ws() + ":" + elements[i]
			}
		}
		if object {
			return "{" + ws() + strings.Join(elements, ",") + "}"
		}
		return "[" + ws() + strings.Join(elements, ",") + "]"
	}))
}

var (
	genSpace = rapid.SampledFrom([]string{"", "", "", " ", "\n  ", "\t", "\r\n"})
	genKey   = rapid.SampledFrom([]string{`"a"`, `"b"`, `"kv_transfer_params"`, `"kv\u005ftransfer_params"`, `"stream"`, `""`, `"é"`, `"a\"b"`, `"max_tokens"`})
)

func TestAnyBodySurvivesAnEditByteForByte(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type part struct{ name, gap, key, value, tail string }
		keys := rapid.SliceOfNDistinct(genKey, 0, 7, func(k string) string { return unquote([]byte(k)) }).Draw(t, "keys")
		parts := make([]part, len(keys))
		for i, k := range keys {
			parts[i] = part{unquote([]byte(k)), genSpace.Draw(t, "gap"), k + genSpace.Draw(t, "colon") + ":" + genSpace.Draw(t, "value gap"),
				genValue(3).Draw(t, "value"), genSpace.Draw(t, "tail")}
		}
		before, after := genSpace.Draw(t, "before"), genSpace.Draw(t, "after")
		write := func(change func(part) (part, bool)) string {
			var all []string
			for _, p := range parts {
				if p, keep := change(p); keep {
					all = append(all, p.gap+p.key+p.value+p.tail)
				}
			}
			return before + "{" + strings.Join(all, ",") + "}" + after
		}
		body := write(func(p part) (part, bool) { return p, true })
		o, err := parseObject([]byte(body))
		if err != nil {
			t.Fatalf("%q: %v", body, err)
		}
		target := unquote([]byte(genKey.Draw(t, "target")))
		value := genValue(2).Draw(t, "new value")

		got := string(o.edit(replace(target, value)))
		want := write(func(p part) (part, bool) {
			if p.name == target {
				p.value = value
			}
			return p, true
		})
		if got != want {
			t.Fatalf("replace %q in %q\n got %q\nwant %q", target, body, got, want)
		}

		// Removing leaves every other member with its bytes, in order.
		got = string(o.edit(remove(target)))
		left, err := parseObject([]byte(got))
		if err != nil {
			t.Fatalf("remove %q from %q: %q: %v", target, body, got, err)
		}
		rest := slices.DeleteFunc(slices.Clone(parts), func(p part) bool { return p.name == target })
		if len(rest) != len(left.members) {
			t.Fatalf("%d members left, want %d", len(left.members), len(rest))
		}
		for i, m := range left.members {
			if s := got[m.start:m.end]; s != rest[i].key+rest[i].value {
				t.Fatalf("member %d is %q, want %q", i, s, rest[i].key+rest[i].value)
			}
		}
		if string(o.src) != body {
			t.Fatal("the source changed")
		}
	})
}

func FuzzEdit(f *testing.F) {
	for _, s := range []string{`{}`, `{"a":1,"k":[1,{"k":2}],"b":"\u006b"}`, ` {"\u006b" : 1e5 ,"":null} `, `{"a":1,"a":2}`, offer, `[1]`, `{"a":"\ud800"}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		source := bytes.Clone(data)
		o, err := parseObject(data)
		var ref map[string]json.RawMessage
		refErr := json.Unmarshal(data, &ref)
		if err != nil {
			// The only texts that encoding/json takes and we do not.
			if refErr == nil && ref != nil && utf8.Valid(data) && !strings.Contains(err.Error(), "twice") && !strings.Contains(err.Error(), "deeper") {
				t.Fatalf("%q: %v", data, err)
			}
			return
		}
		if refErr != nil {
			t.Fatalf("%q taken, but %v", data, refErr)
		}
		if len(ref) != len(o.members) {
			t.Fatalf("%d members, encoding/json has %d", len(o.members), len(ref))
		}
		for _, e := range []edit{set("k", `{"new":[1]}`), replace("k", "7"), remove("k")} {
			out := o.edit(e)
			var got map[string]json.RawMessage
			if err := json.Unmarshal(out, &got); err != nil {
				t.Fatalf("%q became %q: %v", data, out, err)
			}
			want := map[string]json.RawMessage{}
			for k, v := range ref {
				want[k] = v
			}
			_, there := ref["k"]
			switch {
			case e.value == nil:
				delete(want, "k")
			case there || e.add:
				want["k"] = e.value
			}
			if fmt.Sprint(want) != fmt.Sprint(got) {
				t.Fatalf("%q became %q", data, out)
			}
		}
		if !bytes.Equal(source, data) {
			t.Fatal("the source changed")
		}
	})
}
