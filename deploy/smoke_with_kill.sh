#!/bin/sh
# Runs a smoke profile, and kills a worker by SIGKILL in the middle of an update:
#   sh deploy/smoke_with_kill.sh PROFILE [SERVICE]      SERVICE: whose container loses its worker [worker]
# COMPOSE is the command, `docker compose` unless given. Exits as the smoke does. `down` is left to you.
set -eu
profile=$1
service=${2:-worker}
compose=${COMPOSE:-docker compose}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

RL_PLANE_SMOKE_KILL=1 $compose --profile "$profile" run --rm -T "$profile" >"$log" 2>&1 &
smoke=$!
tail -n +1 -f --pid "$smoke" "$log" &
shown=$!

# The smoke bounds its own waits, so this loop ends with it.
until grep -q 'kill a worker now' "$log"; do
    kill -0 "$smoke" 2>/dev/null || break
    sleep 0.2
done
if grep -q 'kill a worker now' "$log"; then
    # Every process of the container but its init, which then ends with an error. So the policy `restart: on-failure`
    # starts the container again. After `docker kill` it would not, because that counts as a stop by hand.
    $compose --profile "$profile" exec -T "$service" python -c 'import os; os.kill(-1, 9)' || true
fi

status=0
wait "$smoke" || status=$?
wait "$shown" || true
exit "$status"
