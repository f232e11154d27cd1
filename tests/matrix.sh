#!/usr/bin/env bash
# Run the quick tests on every supported Python that this machine has; arguments go to pytest.
# NUMPY=1.22.4 in the environment tries that numpy instead of the newest allowed one.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

find_python() {  # $1: 3.9; prints an interpreter that really runs (a pyenv shim may not)
  local candidate
  while read -r candidate; do
    if [ -n "$candidate" ] && "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null
    then echo "$candidate"; return; fi
  done < <(command -v "python$1"; ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python 2>/dev/null | sort -rV)
  return 1
}

table=() failed=0 ran=0
for version in 3.9 3.10 3.11 3.12; do
  if ! python=$(find_python "$version"); then table+=("$version|-|absent"); continue; fi
  echo "== Python $version ($python)"
  env=.venv-$version${NUMPY:+-numpy$NUMPY} numpy=- result="failed: no environment" ran=$((ran + 1))
  if "${MAKE:-make}" --no-print-directory setup VENV="$env" PYTHON="$python" EXTRA="${NUMPY:+numpy==$NUMPY}"; then
    numpy=$("$env/bin/python" -c "import numpy; print(numpy.__version__)")
    if "$env/bin/python" -m pytest -q -m "not slow" "$@" 2>&1 | tee "$env/pytest.log"
    then result="passed"; else result="failed"; fi
    result+=": $(tail -n 1 "$env/pytest.log")"
  fi
  case $result in failed*) failed=1 ;; esac
  table+=("$version|$numpy|$result")
done

printf '\n%-8s %-8s %s\n' Python numpy result
for row in "${table[@]}"; do IFS='|' read -r version numpy result <<<"$row"; printf '%-8s %-8s %s\n' "$version" "$numpy" "$result"; done
if [ "$ran" = 0 ]; then echo "no Python 3.9 to 3.12 was found" >&2; exit 1; fi
exit "$failed"
