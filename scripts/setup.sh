# Sourced by the other scripts: a virtual environment with the given extras, and the system packages
# that software rendering needs. Safe to run again; does nothing when all is there.
#
#   DOUBLURE_EXTRAS   extras of pyproject.toml to install, default "dev"
#   DOUBLURE_VENV     where the environment goes, default .venv of the repository
#   PYTHON            interpreter to make it from, default the newest of python3.12, 3.11, python3

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${DOUBLURE_VENV:-$repository/.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
cd "$repository"
extras=${DOUBLURE_EXTRAS:-dev}
system_packages="libvulkan1 mesa-vulkan-drivers"

say() { printf '%s\n' "$*" >&2; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# Install Debian packages where we may; otherwise say exactly what to run.
need_packages() {
    if command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }; then
        say "installing system packages: $*"
        { as_root apt-get update -qq && DEBIAN_FRONTEND=noninteractive as_root apt-get install -y -qq "$@"; } \
            >/dev/null && return 0
    fi
    say "missing system packages; please run: sudo apt-get install $*"
    return 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.12 python3.11 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s' "$candidate"
            return 0
        fi
    done
    say "doublure needs Python 3.11 or newer; install it, or name it: PYTHON=/path/to/python3 $0"
    return 1
}

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    say "creating $venv with $("$python" --version)"
    "$python" -m venv "$venv" 2>/dev/null || {
        need_packages python3-venv
        "$python" -m venv "$venv"
    }
fi

# The stamp holds what was installed for: other extras or other requirements install again.
stamp=$venv/.doublure-installed
wanted=$(printf '%s\n' "$extras" "$PWD"; cat pyproject.toml constraints.txt)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    say "installing doublure[$extras] and what it needs into $venv (minutes, the first time)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable ".[$extras]" >&2
    case $extras in
        *trainer* | *dev*)
            say "compiling the training loops (once, about 15 s)"
            "$venv/bin/python" -c "from doublure_trainer.fused import prepare; prepare()" >&2
            ;;
    esac
    case $extras in
        *kernels* | *dev*)
            say "compiling the rasterizer (once, about a minute)"
            "$venv/bin/python" -c "from doublure_kernels.cpu import prepare as p; p('float32'); p('float64')" >&2
            ;;
    esac
    printf '%s\n' "$wanted" >"$stamp"
fi

# Software rendering is only needed where no GPU driver is; lavapipe beside a real driver does no harm.
# By one pattern at a time: ls fails when any of several is not there.
has_vulkan_driver() { compgen -G "/usr/share/vulkan/icd.d/*.json" || compgen -G "/etc/vulkan/icd.d/*.json"; }
if [ "$(uname -s)" = Linux ] && ! has_vulkan_driver >/dev/null; then
    # shellcheck disable=SC2086
    need_packages $system_packages || say "going on without a Vulkan driver: the NumPy host will be used"
fi

# The tests run exported shaders through the usual compilers, and the rasterizer through Vulkan's
# validation layer; nothing else needs them.
has_validation() { compgen -G "/usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json"; }
case $extras in
    *dev*)
        if ! command -v glslangValidator >/dev/null || ! command -v spirv-val >/dev/null; then
            need_packages glslang-tools spirv-tools libegl1 libgl1 ||
                say "going on without shader compilers: the tests of exported shaders are skipped"
        fi
        # By itself: where there is no such package, the others are wanted all the same.
        if [ "$(uname -s)" = Linux ] && ! has_validation >/dev/null; then
            need_packages vulkan-validationlayers ||
                say "going on without Vulkan's validation layer: its test is skipped"
        fi
        ;;
esac
