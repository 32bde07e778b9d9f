# crust: every target is one line that calls the real tool. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# setup has an order, and what fills both cores runs side by side by itself.
.NOTPARALLEL:

VENV := .venv
PY := $(VENV)/bin/python
PIP = $(PY) -m pip --quiet --disable-pip-version-check
SOURCES := crust conformance examples tests benchmarks stubs
CACHE := .cache

# The packages of the distribution that tests, demo and benchmarks need; Debian 12 itself pins their versions.
PACKAGES := python3 python3-venv qemu-system-x86 e2fsprogs xfsprogs btrfs-progs cpio lz4 zstd mount util-linux containerd runc bubblewrap libseccomp2 strace udev lvm2 systemd systemd-container prometheus mmdebstrap umoci ceph-mon ceph-mgr ceph-osd ceph-common python3-rados python3-rbd qemu-block-extra qemu-utils iproute2

# What a killed run has left goes by its mark: tests, demos and benchmarks.
RUN := tests/marked_run.sh

# If this machine lacks a capability named in REQUIRED, the tests that need it fail; without REQUIRED they skip.
PYTEST = TESTS_REQUIRE=$(REQUIRED) $(RUN) $(WITHIN) \
	sh -c 'exec $(PY) -m pytest --basetemp="$$TMPDIR/t" --durations=20 "$$@"' pytest

# Everything that touches the host runs in a mount namespace of its own, so that leaked mounts end with it.
PRIVATE := unshare --mount --propagation private

# Tests start some thousand Python processes: an environment that forbids Python to keep what it compiled, as those of
# container images do, would make each of them compile everything again.
export PYTHONDONTWRITEBYTECODE :=

# How many tests run at the same time.
JOBS ?= 2

# For tests that touch the host: each worker has mounts of its own, and runs whole files, whose fixtures are then made
# once. The loop devices of the machine are shared: a test looks only at those of its own files.
# A worker that dies ends the run, and its test is named: a new worker in its place would wait for ever.
SIDE_BY_SIDE = --dist loadfile --no-loadscope-reorder --max-worker-restart=0 --tx "$(JOBS)*popen//python=$(PRIVATE) $(PY)"

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Checked first, so that the reason is clear before some tool fails.
.PHONY: root
root:
	@[ "$$(id -u)" = 0 ] || { echo "error: this target mounts and attaches devices: run it as root" >&2; exit 1; }

.PHONY: setup
setup: packages $(VENV)/.done ## install all that the other targets need (as root, Debian 12)

.PHONY: packages
packages:
	@tests/install_packages.sh $(PACKAGES)

# Ceph's Python modules come from the distribution, for its own Python only, and are on no index: the two files are
# linked, because the whole directory of the distribution's modules would come with it. With another Python they are
# missing, and what needs them says so.
CEPH_BINDING = $(PY) -c "import os, sys, sysconfig as s; \
	names = [n + s.get_config_var('EXT_SUFFIX') for n in ('rados', 'rbd')]; \
	[(os.path.lexists(t) and os.remove(t), os.symlink('/usr/lib/python3/dist-packages/' + n, t)) \
	for n in names for t in [os.path.join(s.get_path('platlib'), n)]]"

# Without network pip prints "no matching distribution" after five retries.
$(VENV)/.done: pyproject.toml conformance/pyproject.toml
	@python3 -m venv $(VENV) && \
	$(PIP) install 'pip>=25.1' && $(PIP) install --group dev --editable '.[kata-example]' --editable ./conformance && $(CEPH_BINDING) && touch $@ || \
	{ echo "error: $(VENV) cannot be filled, see above: check the network, and where pip looks for packages" >&2; exit 1; }

.PHONY: guest
guest: setup ## build the microVM's kernel and initramfs from the distribution's packages
	$(PY) -m examples.kata.guest build

# Its packages are none of crust's, and its protobuf is another one: an environment of its own.
EMBER := tests/support/third_party/ember.txt
# The suite that authors of CSI drivers know, built by Go 1.26 or newer: this machine's, else the one of a package of the
# Python index, in an environment of its own.
CSI_SANITY := tests/support/third_party/csi_sanity.txt
# What renders the chart of deploy/helm.
HELM := $(CACHE)/helm/helm
.PHONY: third-party
third-party: $(CACHE)/ember/.done $(CACHE)/csi-sanity/csi-sanity $(CACHE)/go/driver $(HELM) ## the public CSI driver that the tests wrap, csi-sanity, the driver in Go, and helm
$(CACHE)/ember/.done: $(EMBER)
	@rm -rf $(@D) && python3 -m venv $(@D) && $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $< && touch $@ || \
	{ echo "error: $(@D) cannot be filled, see above: check the network, and where pip looks for packages" >&2; exit 1; }

$(CACHE)/csi-sanity/csi-sanity: $(CSI_SANITY)
	@tests/build_go_program.sh $$(cat $<) $(@D) && touch $@

$(CACHE)/go/driver: $(shell find examples/go specs/proto -type f)
	@tests/build_go_driver.sh $(@D)

$(HELM): tests/support/third_party/helm.txt
	@tests/build_go_program.sh $$(cat $<) $(@D) && touch $@

.PHONY: wheel
wheel: $(VENV)/.done ## build the wheels of crust and of its conformance suites into build/, with the packages that they need
	@rm -rf build/*.whl build/*-any.cdx.json build/lib conformance/build # setuptools would pack modules that are gone, and it packs modes
	@mkdir -p build && cp deploy/requirements.txt build
	umask 022 && git ls-files -z | xargs -0 chmod u=rwX,go=rX && \
	export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) && \
	$(PIP) wheel --no-deps --wheel-dir build . ./conformance && \
	$(PY) deploy/image/sbom.py build/crust_csi-*.whl

# pip-tools and pip have to fit, so it has an environment of its own.
.PHONY: requirements
requirements: ## choose the versions of all Python packages of a node anew, with their hashes: deploy/requirements.txt
	@python3 -m venv $(CACHE)/pip-tools && $(CACHE)/pip-tools/bin/pip install --quiet pip-tools==7.6.2
	$(CACHE)/pip-tools/bin/pip-compile --quiet --generate-hashes --strip-extras --allow-unsafe --no-header --upgrade \
		--no-emit-index-url --no-emit-trusted-host --no-emit-find-links --extra kubernetes --extra otel \
		--output-file deploy/requirements.txt pyproject.toml

.PHONY: image
image: root setup ## build the OCI image of crust, build/crust-csi-<version>.tar; ARCHITECTURE=arm64 with qemu-user-static and arch-test (root)
	$(PY) deploy/image/build.py $(if $(ARCHITECTURE),--architecture $(ARCHITECTURE))

# pip-audit's packages have bounds of their own, so it has an environment too.
.PHONY: audit
audit: wheel ## name packages of the bills in build/ that have known and mended faults, or are not the newest; after make image
	@python3 -m venv $(CACHE)/pip-audit && $(CACHE)/pip-audit/bin/pip install --quiet pip-audit==2.10.1
	$(CACHE)/pip-audit/bin/python deploy/image/audit.py build/*.cdx.json

.PHONY: demo
demo: root guest ## publish volumes to a microVM on this machine, step by step (root)
	@$(RUN) $(PRIVATE) $(PY) -m examples.kata.demo

.PHONY: cluster-demo
cluster-demo: root guest ## three nodes with local pools of their own, and Ceph, on this machine (root)
	@$(RUN) $(PRIVATE) $(PY) -m examples.cluster

test integration conformance e2e forms upgrade lies kills false-refusals simulate: WITHIN = tests/in_memory.sh
test: REQUIRED = mount,loop,cgroups,vm,containerd,systemd,ember,csi-sanity,go-driver
e2e: REQUIRED = mount,loop,vm,ember
integration: REQUIRED = mount,loop,cgroups,containerd,systemd,ember,csi-sanity,go-driver
conformance: REQUIRED = mount,loop,ember,csi-sanity
forms: REQUIRED = mount,loop,vm,containerd,systemd
upgrade: REQUIRED = mount,loop,vm,systemd
lies kills false-refusals simulate: REQUIRED = mount,loop

.PHONY: test
test: root guest third-party ## all tests, including their set-up (root)
	@$(PYTEST) -n $(JOBS) tests/unit
	@$(PYTEST) $(SIDE_BY_SIDE) tests/e2e tests/integration

.PHONY: unit
unit: $(VENV)/.done $(HELM) ## the tests that do not need root
	@$(PYTEST) -n $(JOBS) tests/unit

# In an environment beside the other. test_requirements.py compares with newer versions, those of deploy/requirements.txt.
.PHONY: lowest
lowest: private PY = $(CACHE)/lowest/bin/python
lowest: $(VENV)/.done $(HELM) ## the tests that do not need root, with the lowest versions that pyproject.toml allows
	@python3 -m venv $(CACHE)/lowest && $(PIP) install 'pip>=25.1' && \
	$(PIP) install --group dev --editable '.[kata-example]' --editable ./conformance && $(CEPH_BINDING) && \
	$(PIP) install $$(python3 tests/lowest_versions.py)
	@$(PYTEST) -n $(JOBS) --ignore tests/unit/deploy/test_requirements.py tests/unit

.PHONY: simulate
simulate: export SEEDS ?= 100
simulate: root $(VENV)/.done ## random lives of a node under a simulated kubelet, and of a pool; SEEDS=n (docs/reliability.md; root)
	@$(PYTEST) -n $(JOBS) tests/unit/proxy/test_simulation.py
	@$(PYTEST) $(SIDE_BY_SIDE) tests/integration/blockdriver/pools/test_promises.py \
		tests/integration/ceph/test_promises.py

.PHONY: integration
integration: root setup third-party ## the tests on real loop devices, mounts and sockets (root)
	@$(PYTEST) $(SIDE_BY_SIDE) tests/integration

.PHONY: conformance
conformance: export TESTS_REPORTS = build/conformance
conformance: root setup third-party ## crust's driver against its suite, alone and behind proxy and shim; reports in build/conformance (root)
	@$(PYTEST) $(SIDE_BY_SIDE) tests/integration/conformance

.PHONY: lies
lies: export TESTS_LIES = all
lies: root $(VENV)/.done ## each call by which a device is asked about, and at each step of a volume's life, fails once with each errno (root)
	@$(PYTEST) $(SIDE_BY_SIDE) tests/integration/host/block/test_lies.py tests/integration/chain/test_*lies.py

.PHONY: forms
forms: export TESTS_FORMS = all
forms: root setup guest $(HELM) ## the whole list of what a node must be able to do, under the units and in the pods of the chart (root)
	@$(PYTEST) $(SIDE_BY_SIDE) tests/integration/systemd/test_units.py tests/integration/systemd/test_capabilities.py tests/integration/containers/test_pods.py

.PHONY: upgrade
upgrade: export TESTS_UPGRADE = all
upgrade: export TESTS_UPGRADE_FROM = $(FROM)
upgrade: root guest ## the upgrade and the way back by docs/operations.md, from an earlier commit, under a microVM; FROM=<commit> (root)
	@$(PYTEST) $(SIDE_BY_SIDE) tests/integration/systemd/test_upgrade.py

.PHONY: kills
kills: export TESTS_KILLS = all
kills: root $(VENV)/.done ## two parts of a node die, in every order, after each step of a volume's life (root)
	@$(PYTEST) $(SIDE_BY_SIDE) tests/integration/kata/test_deaths.py

.PHONY: false-refusals
false-refusals: export TESTS_LIVES = 10000
false-refusals: export TESTS_PROCESSES = 2000
false-refusals: export TESTS_OPEN_FILES = 200000
false-refusals: root $(VENV)/.done ## 10,000 lives of a target beside 2,000 short-lived processes, and 200,000 open files: nothing is refused (root)
	@$(PYTEST) tests/integration/kata/test_many_open_files.py tests/integration/proxy/test_false_refusals.py

.PHONY: e2e
e2e: root guest third-party ## the tests that boot the microVM (root)
	@$(PYTEST) $(SIDE_BY_SIDE) tests/e2e

.PHONY: kata
kata: export KATA_NODE = $(NODE)
kata: export KATA_RUNTIMES = $(RUNTIMES)
kata: root $(VENV)/.done ## the chain with a real Kata on a node; NODE=dir RUNTIMES=name=configuration.toml,... (docs/kata.md; root)
	@$(PYTEST) -q --timeout 500 tests/real_kata

# etcd, Kubernetes and containerd, in the versions of tests/support/third_party/kubernetes.
KUBERNETES := $(shell find tests/support/third_party/kubernetes -type f) tests/build_kubernetes.sh
$(CACHE)/kubernetes/bin/kubelet: $(KUBERNETES)
	@tests/build_kubernetes.sh $(@D) && touch $@
$(CACHE)/kubernetes/bin/containerd: $(KUBERNETES)
	@tests/build_kubernetes.sh $(@D) whole && touch $(@D)/kubelet $@

kubelet kubernetes: WITHIN = tests/in_node_namespaces.sh
kubelet kubernetes: REQUIRED = mount,loop,vm,kubernetes

.PHONY: kubelet
kubelet: root guest $(CACHE)/kubernetes/bin/kubelet ## a claim in a microVM under a real kubelet, which it builds first (docs/conformance.md; root)
	@$(PYTEST) tests/kubelet

.PHONY: kubernetes
kubernetes: root image $(HELM) $(CACHE)/kubernetes/bin/containerd ## the chart in a real Kubernetes, which it builds first (docs/conformance.md; root)
	@$(PYTEST) tests/kubernetes

.PHONY: size
size: $(VENV)/.done ## count lines by package, and error classes
	@$(PY) -m tests.support.measures.size

.PHONY: trace
trace: root $(VENV)/.done ## count functions and files that run in a publish, a creation and a stage; VERBOSE=1 names them (root)
	@$(RUN) $(PRIVATE) $(PY) -m tests.support.measures.trace $(if $(VERBOSE),--verbose)

.PHONY: lint
lint: $(VENV)/.done ## ruff, mypy --strict, import-linter, codespell
	$(VENV)/bin/ruff format --check $(SOURCES) specs deploy
	$(VENV)/bin/ruff check $(SOURCES) specs deploy
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy specs/generate.py specs/make_vectors.py specs/make_schema.py
	MYPYPATH=deploy/image $(VENV)/bin/mypy deploy/image/build.py deploy/image/audit.py
	$(VENV)/bin/lint-imports
	$(VENV)/bin/codespell $(SOURCES) docs specs deploy README.md CHANGELOG.md Makefile pyproject.toml

.PHONY: fmt
fmt: $(VENV)/.done ## format, and fix what can be fixed
	$(VENV)/bin/ruff format $(SOURCES)
	$(VENV)/bin/ruff check --fix $(SOURCES)

.PHONY: proto
proto: $(VENV)/.done ## generate crust/wire, the JSON schema, the test vectors and the man pages from their sources
	$(PY) specs/generate.py --into .

.PHONY: manifests
manifests: $(VENV)/.done $(HELM) ## write deploy/kubernetes: the plain manifests, from the chart of deploy/helm
	@$(PY) -m tests.support.chart

.PHONY: docs-output
docs-output: $(VENV)/.done ## write docs/commands.md, what the commands for operators print, and docs/files.md, a line for each file
	$(PY) -m tests.support.pages.cli_output > docs/commands.md
	$(PY) -m tests.support.pages.file_register

.PHONY: check-generated
check-generated: $(VENV)/.done $(HELM) ## check that the generated files are current
	$(PY) specs/generate.py --check
	$(PY) -m tests.support.chart --check

.PHONY: bench
bench: root guest ## run all benchmarks; writes docs/benchmarks.md and its plot
	@$(RUN) $(PRIVATE) $(PY) -m benchmarks

.PHONY: clean
clean: ## remove what the other targets made in this directory
	rm -rf $(VENV) $(CACHE) build dist *.egg-info conformance/build conformance/*.egg-info
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +
