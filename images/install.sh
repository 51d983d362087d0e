# sh install.sh PIP-ARGUMENTS… : one layer of an image. Installs into /opt/tandem, compiles, leaves nothing else behind.
#
# Reads torch.txt and the constraints beside it, and the variables TORCH_INDEX and CPU_ONLY. The secret pip.conf, where a
# builder gives it, says where pip looks; an index's password stands there and in no layer. pip itself is in none either.
set -eu
cd "$(dirname "$0")"
python=/opt/tandem/bin/python
export PIP_CONFIG_FILE=/run/pip.conf PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
export PIP_NO_WARN_SCRIPT_LOCATION=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1

python3 -m venv /pip
install() { /pip/bin/python -m pip --python "$python" install -q --no-compile "$@"; }

constraints=constraints.txt
if [ -n "${TORCH_INDEX:-}" ]; then
    # Torch itself comes from there alone; what it needs, from where pip is used to look.
    constraints=constraints-without-cuda.txt
    install --no-deps --index-url "$TORCH_INDEX" -c "$constraints" -r torch.txt
fi
install -c "$constraints" "$@"
"$python" bytecode.py /opt/tandem/lib
[ ! -d /overlay ] || "$python" bytecode.py /overlay/opt/tandem/lib /overlay
[ -z "${CPU_ONLY:-}" ] || "$python" cpu_only.py
rm -rf /pip ~root/.cache /tmp/*
