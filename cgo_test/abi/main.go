// Abi-check compares nixl/capi.h, this module's own declarations of the NIXL C
// API, with the header of the released crate that Cargo.toml names: the type of
// every function, the value of every constant, the size of every struct and the
// offset and type of its fields. Nothing may be missing on either side.
//
//	go run ./cgo_test/abi
//
// It needs cargo and a C compiler. -header compares with a header at hand
// instead of the crate's.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"

	"github.com/nixlgo/nixlgo/cgo_test/crate"
)

func main() {
	header := flag.String("header", "", "compare with this header instead of the crate's")
	flag.Parse()
	report, err := check(*header)
	if err != nil {
		fmt.Fprintln(os.Stderr, "abi-check:", err)
		os.Exit(1)
	}
	fmt.Println("abi-check:", report)
}

func check(header string) (string, error) {
	_, self, _, _ := runtime.Caller(0)
	here := filepath.Dir(self)
	ours := filepath.Join(here, "..", "..", "nixl", "capi.h")
	version := "given header"
	if header == "" {
		var err error
		if header, version, err = crate.Header(); err != nil {
			return "", err
		}
	}
	theirText, err := os.ReadFile(header)
	if err != nil {
		return "", err
	}
	ourText, err := os.ReadFile(ours)
	if err != nil {
		return "", err
	}
	their, err := parseHeader(string(theirText))
	if err != nil {
		return "", fmt.Errorf("%s: %w", header, err)
	}
	our := regexp.MustCompile(`(?m)^\s*F\(\w+, (\w+),`).FindAllStringSubmatch(string(ourText), -1)
	declared := map[string]bool{}
	for _, m := range our {
		declared["nixl_capi_"+m[1]] = true
	}
	var wrong []string
	for _, f := range their.functions {
		if !declared[f] {
			wrong = append(wrong, f+" is not in capi.h")
		}
		delete(declared, f)
	}
	for f := range declared {
		wrong = append(wrong, f+" is in capi.h only")
	}
	if len(wrong) > 0 {
		return "", fmt.Errorf("%d differences:\n\t%s", len(wrong), strings.Join(wrong, "\n\t"))
	}
	if err := compile(header, ours, their); err != nil {
		return "", err
	}
	return fmt.Sprintf("%d/%d functions, %d constants, %d structs with %d fields equal nixl-sys %s: ok",
		len(our), len(their.functions), len(their.constants), len(their.structs), their.fields(), version), nil
}

type contract struct {
	functions []string
	constants []string
	structs   []structure
}

type structure struct {
	name   string // "struct tag"
	fields []string
}

func (c *contract) fields() (n int) {
	for _, s := range c.structs {
		n += len(s.fields)
	}
	return n
}

var (
	enums    = regexp.MustCompile(`(?s)\benum\s*\w*\s*\{(.*?)\}`)
	structs  = regexp.MustCompile(`(?s)\bstruct\s+(\w+)\s*\{(.*?)\}`)
	lastWord = regexp.MustCompile(`(\w+)\s*$`)
)

// parseHeader lists what the contract declares. The compiler does the rest.
func parseHeader(text string) (*contract, error) {
	text = crate.Uncomment(text)
	c := &contract{functions: crate.Functions(text)}
	for _, m := range enums.FindAllStringSubmatch(text, -1) {
		for item := range strings.SplitSeq(m[1], ",") {
			if name := strings.TrimSpace(strings.SplitN(item, "=", 2)[0]); name != "" {
				c.constants = append(c.constants, name)
			}
		}
	}
	for _, m := range structs.FindAllStringSubmatch(text, -1) {
		s := structure{name: "struct " + m[1]}
		for field := range strings.SplitSeq(m[2], ";") {
			if w := lastWord.FindString(field); w != "" {
				s.fields = append(s.fields, strings.TrimSpace(w))
			}
		}
		c.structs = append(c.structs, s)
	}
	if len(c.functions) == 0 || len(c.constants) == 0 || len(c.structs) == 0 {
		return nil, fmt.Errorf("%d functions, %d constants, %d structs found", len(c.functions), len(c.constants), len(c.structs))
	}
	return c, nil
}

// ourStructs are our names for the contract's structs.
var ourStructs = map[string]string{
	"struct nixl_capi_agent_config_s":   "nx_config",
	"struct nixl_capi_xfer_telemetry_s": "nx_telemetry",
}

// compile lets the C compiler compare both headers in one translation unit.
func compile(header, ours string, their *contract) error {
	var src strings.Builder
	fmt.Fprintf(&src, "#include %q\n#include %q\n", header, ours)
	assert := func(condition, message string) {
		fmt.Fprintf(&src, "_Static_assert(%s, %q);\n", condition, message)
	}
	for _, s := range their.structs {
		our, ok := ourStructs[s.name]
		if !ok {
			return fmt.Errorf("%s is a struct that capi.h does not know", s.name)
		}
		assert(fmt.Sprintf("sizeof(%s) == sizeof(%s)", s.name, our), s.name+" has another size")
		for _, f := range s.fields {
			assert(fmt.Sprintf("offsetof(%s, %s) == offsetof(%s, %s)", s.name, f, our, f), s.name+"."+f+" is elsewhere")
			assert(fmt.Sprintf("__builtin_types_compatible_p(__typeof__(((%s *)0)->%s), __typeof__(((%s *)0)->%s))", s.name, f, our, f),
				s.name+"."+f+" has another type")
		}
	}
	// Constants: each pair of capi.h agrees, and each of the contract is in a pair.
	src.WriteString("#define SAME(ours, theirs, value) _Static_assert((int)ours == (int)theirs && (int)ours == (value), #theirs \" has another value\");\nNX_CONSTANTS(SAME)\n")
	src.WriteString("#define PAIRED(ours, theirs, value) paired_##theirs,\nenum { NX_CONSTANTS(PAIRED) };\n")
	for _, k := range their.constants {
		fmt.Fprintf(&src, "enum { known_%s = paired_%s };\n", k, k)
	}
	// Functions, with our structs standing for theirs now that those are equal.
	for their, our := range ourStructs {
		fmt.Fprintf(&src, "#define %s %s\n", our, their)
	}
	src.WriteString("#define FUNCTION(result, name, params) _Static_assert(__builtin_types_compatible_p(__typeof__(nixl_capi_##name), result params), \"nixl_capi_\" #name \" has another type\");\nNX_FUNCTIONS(FUNCTION)\n")

	dir, err := os.MkdirTemp("", "abi-check")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "check.c")
	if err := os.WriteFile(file, []byte(src.String()), 0o600); err != nil {
		return err
	}
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	out, err := exec.Command(cc, "-std=gnu11", "-fsyntax-only", file).CombinedOutput()
	if err != nil {
		return fmt.Errorf("the headers differ: %w\n%s", err, out)
	}
	return nil
}
