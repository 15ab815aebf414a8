# Every check and measurement of this project; CI runs `make ci`. `make` lists the targets.
NIXL_VERSION = 1.5.1
STATICCHECK  = honnef.co/go/tools/cmd/staticcheck@v0.8.2
PYZMQ        = pyzmq==27.3.0
FUZZTIME    ?= 10s
BENCHTIME   ?= 1s

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup demo build test test-race check abi-check parity fuzz bench ci clean

# Tests must find this NIXL, never another one of the machine.
export NIXLGO_LIBRARY = $(CURDIR)/.nixl/.nixl_cu12.mesonpy.libs/libnixl_capi.so
# Python with pyzmq, the real ZeroMQ that the side channel is tested against.
PYTHON_ENV = PYTHONPATH=$(CURDIR)/.python NIXLGO_PYTHON=python3

NIXL_STAMP   = .nixl/.installed-$(NIXL_VERSION)
PYTHON_STAMP = .python/.installed-$(PYZMQ)

# need,COMMAND,WHAT: stops with WHAT when COMMAND fails.
need = $(1) >/dev/null 2>&1 || { echo "missing: $(2)" >&2; exit 1; }

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(NIXL_STAMP) ## install the pinned NIXL library into .nixl (nothing when it is there)
	@$(call need,go version,Go 1.26 or newer (https://go.dev/dl))
	@$(call need,cc --version,a C compiler (Debian: apt-get install gcc))

$(NIXL_STAMP): nixl/requirements.txt
	@$(call need,python3 -c 'import sys; assert sys.version_info >= (3, 9)',Python 3.9 or newer (Debian: apt-get install python3))
	@$(call need,python3 -m pip --version,pip for python3 (Debian: apt-get install python3-pip))
	@case "$$(uname -sm)" in "Linux x86_64" | "Linux aarch64") ;; \
	  *) echo "missing: a NIXL wheel for $$(uname -sm); it exists for Linux x86_64 and aarch64" >&2; exit 1;; esac
	@echo "setup: installing NIXL $(NIXL_VERSION) for $$(uname -m) into .nixl (65 MB download)"
	@rm -rf .nixl.tmp
	@python3 -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --root-user-action=ignore --no-deps --require-hashes \
	  --only-binary=:all: --implementation cp --python-version 3.12 --abi cp312 --platform "manylinux_2_28_$$(uname -m)" \
	  --target .nixl.tmp -r nixl/requirements.txt || { rm -rf .nixl.tmp; echo "setup: pip could not install NIXL, nothing was left behind" >&2; exit 1; }
	@touch .nixl.tmp/$(notdir $@)
	@rm -rf .nixl && mv .nixl.tmp .nixl
	@echo "setup: NIXL $(NIXL_VERSION) is in .nixl"

$(PYTHON_STAMP):
	@$(call need,python3 -m pip --version,pip for python3 (Debian: apt-get install python3-pip))
	@echo "setup: installing $(PYZMQ) into .python for the interoperability tests"
	@rm -rf .python .python.tmp
	@python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target .python.tmp "$(PYZMQ)" \
	  || { rm -rf .python.tmp; echo "setup: pip could not install $(PYZMQ), nothing was left behind" >&2; exit 1; }
	@touch ".python.tmp/$(notdir $@)"
	@mv .python.tmp .python

build: ## build bin/nixlgo
	@$(call need,go version,Go 1.26 or newer (https://go.dev/dl))
	@$(call need,cc --version,a C compiler (Debian: apt-get install gcc))
	@echo "build: bin/nixlgo"
	@go build -o bin/nixlgo ./cmd/nixlgo

demo: setup build ## pass leased, verified KV blocks between two processes over real NIXL
	@bin/nixlgo demo

test: setup $(PYTHON_STAMP) ## every test, on the real NIXL
	@echo "test: go test ./... on $(NIXLGO_LIBRARY)"
	@$(PYTHON_ENV) go test -count=1 -p 1 -timeout 10m ./...

test-race: setup $(PYTHON_STAMP) ## every test with the race detector, then with cgocheck2
	@echo "test-race: go test -race ./..."
	@$(PYTHON_ENV) go test -race -short -count=1 -p 1 -timeout 15m ./...
	@echo "test-race: GOEXPERIMENT=cgocheck2 go test on the packages that use C"
	@$(PYTHON_ENV) GOEXPERIMENT=cgocheck2 go test -short -count=1 -p 1 -timeout 10m . ./nixl/... ./rdma/... ./cgo_test/...

check: ## formatting, vet, staticcheck, module files, purity of lease
	@echo "check: gofmt -s"; test -z "$$(gofmt -s -l . | tee /dev/stderr)"
	@echo "check: go vet";   go vet ./... && CGO_ENABLED=0 go vet ./lease/... ./rdma/zmtp/...
	@echo "check: staticcheck"; go run $(STATICCHECK) ./...
	@echo "check: go mod tidy"; go mod tidy -diff
	@echo "check: lease imports only the standard library, and builds and passes without cgo"
	@deps=$$(go list -deps -f '{{if not .Standard}}{{.ImportPath}}{{end}}' ./lease | grep -v '^github.com/nixlgo/nixlgo/lease$$' || true); \
	  test -z "$$deps" || { echo "lease imports $$deps" >&2; exit 1; }
	@CGO_ENABLED=0 go test -count=1 ./lease/...

abi-check: ## compare our declarations of the C API with the header of the crate nixl-sys
	@$(call need,cargo --version,cargo (https://rustup.rs))
	@$(call need,cc --version,a C compiler (Debian: apt-get install gcc))
	@go run ./cgo_test/abi

parity: ## which test stands for which public bug report and peer test
	@go run ./cmd/nixlgo/internal/parity

fuzz: setup ## every fuzz target for FUZZTIME
	@for p in $$(go list ./...); do \
	  for f in $$(go test -list '^Fuzz' $$p | grep '^Fuzz' || true); do \
	    echo "fuzz: $$p $$f"; go test -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME) $$p; \
	  done; done

bench: setup ## every Go benchmark
	@go test -run '^$$' -bench . -benchmem -benchtime $(BENCHTIME) -p 1 ./...

ci: check abi-check parity test test-race ## what CI runs
	@$(MAKE) --no-print-directory bench BENCHTIME=1x >/dev/null && echo "bench: every benchmark runs"
	@$(MAKE) --no-print-directory demo

clean: ## remove what the targets made, the NIXL library included
	rm -rf .nixl .nixl.tmp .python .python.tmp bin out
