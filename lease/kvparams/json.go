package kvparams

import (
	"bytes"
	"encoding/json"
	"fmt"
	"unicode/utf8"
)

// maxDepth bounds nesting, as the recursion limit of Python's parser does on
// the other side.
const maxDepth = 1000

// object is one JSON object as bytes, with the places of its members.
type object struct {
	src     []byte
	open    int // index of '{'
	close   int // index of '}'
	members []member
	byName  map[string]int
}

// member is the half-open byte ranges [start, value) of a key with its colon
// and [value, end) of its value.
type member struct {
	name              string // unescaped
	start, value, end int
}

// parseObject reads src, which must be one JSON object with nothing around it
// but white space, and no key twice.
func parseObject(src []byte) (*object, error) {
	if i := invalidUTF8(src); i >= 0 {
		return nil, fmt.Errorf("byte %d is not UTF-8", i)
	}
	s := scanner(src)
	o := &object{src: src, byName: map[string]int{}}
	o.open = s.space(0)
	if o.open == len(src) {
		return nil, fmt.Errorf("want a JSON object, found nothing")
	}
	if src[o.open] != '{' {
		return nil, fmt.Errorf("want a JSON object, found %q at byte %d", src[o.open], o.open)
	}
	end, err := s.object(o.open, 1, func(m member) error {
		if _, twice := o.byName[m.name]; twice {
			return fmt.Errorf("key %.60q comes twice, the second time at byte %d", m.name, m.start)
		}
		o.byName[m.name] = len(o.members)
		o.members = append(o.members, m)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if i := s.space(end); i < len(src) {
		return nil, fmt.Errorf("%d bytes follow the object, from byte %d on", len(src)-i, i)
	}
	o.close = end - 1
	return o, nil
}

func invalidUTF8(b []byte) int {
	if utf8.Valid(b) {
		return -1
	}
	for i := 0; ; {
		r, n := utf8.DecodeRune(b[i:])
		if r == utf8.RuneError && n == 1 {
			return i
		}
		i += n
	}
}

// value is the bytes of the key's value, nil if there is no such key.
func (o *object) value(key string) []byte {
	i, ok := o.byName[key]
	if !ok {
		return nil
	}
	return o.src[o.members[i].value:o.members[i].end]
}

// present tells whether the key is there and not null.
func (o *object) present(key string) bool {
	v := o.value(key)
	return v != nil && !isNull(v)
}

func isNull(v []byte) bool { return string(v) == "null" }

// edit is one change of an object's member.
type edit struct {
	key   string
	value []byte // nil removes the member
	add   bool   // append the member if it is absent
}

func set(key, value string) edit     { return edit{key, []byte(value), true} }
func replace(key, value string) edit { return edit{key, []byte(value), false} }
func remove(key string) edit         { return edit{key: key} }

// edit returns a copy of the object with the edits made and every other byte
// as it was. A removed member takes the comma and the white space before it.
func (o *object) edit(edits ...edit) []byte {
	size := len(o.src)
	byKey := make(map[string]edit, len(edits))
	for _, e := range edits {
		byKey[e.key] = e
		size += len(e.key) + len(e.value) + len(`,"":`)
	}
	dst := append(make([]byte, 0, size), o.src[:o.open+1]...)

	empty, last := true, o.open+1 // whether dst has a member; where the last one of src ends
	for _, m := range o.members {
		gap := o.src[last:m.start]
		last = m.end
		e, edited := byKey[m.name]
		if edited && e.value == nil {
			continue
		}
		if empty { // only the first gap has no comma
			gap = o.src[o.open+1 : o.members[0].start]
		}
		empty = false
		dst = append(dst, gap...)
		if edited {
			dst = append(append(dst, o.src[m.start:m.value]...), e.value...)
		} else {
			dst = append(dst, o.src[m.start:m.end]...)
		}
	}
	for _, e := range edits {
		if _, there := o.byName[e.key]; there || !e.add {
			continue
		}
		if !empty {
			dst = append(dst, ',')
		}
		empty = false
		dst = append(append(append(append(dst, '"'), e.key...), `":`...), e.value...)
	}
	return append(dst, o.src[last:]...)
}

// quote writes s as a JSON string.
func quote(s string) string {
	b, _ := json.Marshal(s) // a string always marshals
	return string(b)
}

// scanner walks JSON text (RFC 8259) without building anything.
type scanner []byte

func (s scanner) errorf(i int, format string, args ...any) error {
	return fmt.Errorf("byte %d: %s", i, fmt.Sprintf(format, args...))
}

func (s scanner) unexpected(i int, want string) error {
	if i >= len(s) {
		return s.errorf(i, "the text ends, want %s", want)
	}
	return s.errorf(i, "found %q, want %s", s[i], want)
}

func (s scanner) space(i int) int {
	for i < len(s) && (s[i] == ' ' || s[i] == '\t' || s[i] == '\n' || s[i] == '\r') {
		i++
	}
	return i
}

func (s scanner) is(i int, c byte) bool { return i < len(s) && s[i] == c }

// value returns the index after the value at i. depth counts the containers it
// would be in.
func (s scanner) value(i, depth int) (int, error) {
	if i >= len(s) {
		return 0, s.unexpected(i, "a value")
	}
	switch c := s[i]; {
	case c == '{':
		return s.object(i, depth+1, func(member) error { return nil })
	case c == '[':
		return s.array(i, depth+1, func([]byte) error { return nil })
	case c == '"':
		return s.text(i)
	case c == '-' || '0' <= c && c <= '9':
		return s.number(i)
	}
	for _, word := range []string{"true", "false", "null"} {
		if bytes.HasPrefix(s[i:], []byte(word)) {
			return i + len(word), nil
		}
	}
	return 0, s.unexpected(i, "a value")
}

// object visits the members of the object at i and returns the index after it.
func (s scanner) object(i, depth int, visit func(member) error) (int, error) {
	if depth > maxDepth {
		return 0, s.errorf(i, "nested deeper than %d", maxDepth)
	}
	i = s.space(i + 1)
	if s.is(i, '}') {
		return i + 1, nil
	}
	for {
		m := member{start: i}
		if !s.is(i, '"') {
			return 0, s.unexpected(i, "a key")
		}
		end, err := s.text(i)
		if err != nil {
			return 0, err
		}
		m.name = unquote(s[i:end])
		if i = s.space(end); !s.is(i, ':') {
			return 0, s.unexpected(i, "':'")
		}
		m.value = s.space(i + 1)
		if m.end, err = s.value(m.value, depth); err != nil {
			return 0, err
		}
		if err := visit(m); err != nil {
			return 0, err
		}
		i = s.space(m.end)
		if s.is(i, '}') {
			return i + 1, nil
		}
		if !s.is(i, ',') {
			return 0, s.unexpected(i, "',' or '}'")
		}
		i = s.space(i + 1)
	}
}

// array visits the elements of the array at i and returns the index after it.
func (s scanner) array(i, depth int, visit func(element []byte) error) (int, error) {
	if depth > maxDepth {
		return 0, s.errorf(i, "nested deeper than %d", maxDepth)
	}
	i = s.space(i + 1)
	if s.is(i, ']') {
		return i + 1, nil
	}
	for {
		end, err := s.value(i, depth)
		if err != nil {
			return 0, err
		}
		if err := visit(s[i:end]); err != nil {
			return 0, err
		}
		i = s.space(end)
		if s.is(i, ']') {
			return i + 1, nil
		}
		if !s.is(i, ',') {
			return 0, s.unexpected(i, "',' or ']'")
		}
		i = s.space(i + 1)
	}
}

// elements splits an array that was scanned before; ok is false for any other
// value.
func elements(v []byte) (all [][]byte, ok bool) {
	if len(v) == 0 || v[0] != '[' {
		return nil, false
	}
	_, err := scanner(v).array(0, 1, func(e []byte) error {
		all = append(all, e)
		return nil
	})
	return all, err == nil
}

func (s scanner) text(i int) (int, error) {
	start := i
	for i++; i < len(s); i++ {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' {
			continue
		}
		if c == '"' {
			return i + 1, nil
		}
		if c < ' ' {
			return 0, s.errorf(i, "control character %q in a string", c)
		}
		if i++; i >= len(s) {
			break
		}
		switch s[i] {
		case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		case 'u':
			for range 4 {
				if i++; i >= len(s) || !isHex(s[i]) {
					return 0, s.unexpected(i, "four hexadecimal digits")
				}
			}
		default:
			return 0, s.unexpected(i, "an escape")
		}
	}
	return 0, s.errorf(start, "the string does not end")
}

func isHex(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F'
}

func (s scanner) digits(i int) int {
	for i < len(s) && '0' <= s[i] && s[i] <= '9' {
		i++
	}
	return i
}

func (s scanner) number(i int) (int, error) {
	if s.is(i, '-') {
		i++
	}
	end := s.digits(i)
	if end == i {
		return 0, s.unexpected(i, "a digit")
	}
	if s[i] == '0' {
		end = i + 1
	}
	if s.is(end, '.') {
		i = end + 1
		if end = s.digits(i); end == i {
			return 0, s.unexpected(i, "a digit")
		}
	}
	if s.is(end, 'e') || s.is(end, 'E') {
		i = end + 1
		if s.is(i, '+') || s.is(i, '-') {
			i++
		}
		if end = s.digits(i); end == i {
			return 0, s.unexpected(i, "a digit")
		}
	}
	return end, nil
}

// unquote reads a string that was scanned before.
func unquote(v []byte) string {
	if bytes.IndexByte(v, '\\') < 0 {
		return string(v[1 : len(v)-1])
	}
	var s string
	_ = json.Unmarshal(v, &s) // scanned before
	return s
}
