# sh install.sh PIP-ARGUMENTS… : one layer of an image. Installs into /opt/tandem, compiles bytecode, and leaves nothing else behind.
#
# Reads torch.txt and the constraints beside it, and the variables TORCH_INDEX and CPU_ONLY. The secret pip.conf, where a
# builder provides it, configures pip; an index's password is only there and in no layer. Nor is pip itself.
set -eu
cd "$(dirname "$0")"
python=/opt/tandem/bin/python
export PIP_CONFIG_FILE=/run/pip.conf PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
export PIP_NO_WARN_SCRIPT_LOCATION=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1

python3 -m venv /pip
install() { /pip/bin/python -m pip --python "$python" install -q --no-compile "$@"; }

constraints=constraints.txt
if [ -n "${TORCH_INDEX:-}" ]; then
    # Torch itself comes from this index alone; its dependencies come from the default one.
    constraints=constraints-without-cuda.txt
    install --no-deps --index-url "$TORCH_INDEX" -c "$constraints" -r torch.txt
fi
install -c "$constraints" "$@"
"$python" bytecode.py /opt/tandem/lib
[ ! -d /overlay ] || "$python" bytecode.py /overlay/opt/tandem/lib /overlay
[ -z "${CPU_ONLY:-}" ] || "$python" cpu_only.py
rm -rf /pip ~root/.cache /tmp/*
