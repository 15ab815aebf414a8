package main

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"
)

// format is how a subcommand prints what it has to say.
type format string

const (
	formatText format = "text" // for people
	formatJSON format = "json" // one object a line
	formatCSV  format = "csv"  // tables only
)

// formatFlags adds --json, and --format with it where the output is a table. p holds the choice; --json is short for
// --format json, and two that contradict each other are refused.
func formatFlags(f *pflag.FlagSet, p *format, table bool) {
	*p = formatText
	said := new(string)
	choose := func(flag string, v format) error {
		if *said != "" && v != *p {
			return fmt.Errorf("contradicts --%s", *said)
		}
		*p, *said = v, flag
		return nil
	}
	what := "print one JSON object a line"
	if table {
		what = "short for --format json"
		f.Func("format", "text, json (one object a line) or csv (default text)", func(s string) error {
			switch v := format(s); v {
			case formatText, formatJSON, formatCSV:
				return choose("format", v)
			}
			return errors.New("want text, json or csv")
		})
	}
	f.BoolFunc("json", what, func(s string) error {
		switch s {
		case "true":
			return choose("json", formatJSON)
		case "false":
			return nil
		}
		return errors.New("want true or false")
	})
}

// column of a table.
type column struct {
	Key   string // in JSON and CSV
	Head  string // in text
	Width int    // in text, at least; 0: as the heading
	Verb  string // in text; empty: %v. JSON and CSV have every digit
}

// table prints rows as they come. The first error of writing is kept, and end returns it.
type table struct {
	w       io.Writer
	format  format
	columns []column
	csv     *csv.Writer
	rows    int
	err     error
}

func newTable(w io.Writer, f format, columns []column) *table {
	return &table{w: w, format: f, columns: columns, csv: csv.NewWriter(w)}
}

// row prints one value a column. Text and CSV begin with the headings.
func (t *table) row(values ...any) {
	if t.err != nil {
		return
	}
	t.rows++
	switch t.format {
	case formatJSON:
		t.err = t.object(values)
	case formatCSV:
		if t.rows == 1 {
			t.record(func(i int) string { return t.columns[i].Key })
		}
		t.record(func(i int) string { return fmt.Sprint(values[i]) })
		t.csv.Flush() // a table may take minutes
		t.err = t.csv.Error()
	default:
		if t.rows == 1 {
			t.line(func(i int) string { return t.columns[i].Head })
		}
		t.line(func(i int) string {
			if verb := t.columns[i].Verb; verb != "" {
				return fmt.Sprintf(verb, values[i])
			}
			return fmt.Sprint(values[i])
		})
	}
}

func (t *table) object(values []any) error {
	b := []byte{'{'}
	for i, v := range values {
		key, _ := json.Marshal(t.columns[i].Key) // a string always marshals
		value, err := json.Marshal(v)
		if err != nil {
			return fmt.Errorf("column %s: %w", t.columns[i].Key, err)
		}
		if i > 0 {
			b = append(b, ',')
		}
		b = append(append(append(b, key...), ':'), value...)
	}
	_, err := t.w.Write(append(b, '}', '\n'))
	return err
}

func (t *table) record(cell func(int) string) {
	cells := make([]string, len(t.columns))
	for i := range cells {
		cells[i] = cell(i)
	}
	_ = t.csv.Write(cells) // Error has it
}

func (t *table) line(cell func(int) string) {
	var b strings.Builder
	for i, c := range t.columns {
		width := c.Width
		if width == 0 {
			width = len(c.Head) + 2
		}
		fmt.Fprintf(&b, "%-*s", width, cell(i))
	}
	_, err := io.WriteString(t.w, strings.TrimRight(b.String(), " ")+"\n")
	if t.err == nil {
		t.err = err
	}
}

// end returns the first error.
func (t *table) end() error { return t.err }

// many is a number and what there are so many of: 1 block, 2 blocks.
func many[N int | int64](n N, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

// say prints one line: text for people, or v as a JSON object.
func say(w io.Writer, f format, v any, text string, a ...any) error {
	if f == formatJSON {
		return json.NewEncoder(w).Encode(v)
	}
	_, err := fmt.Fprintf(w, text+"\n", a...)
	return err
}
