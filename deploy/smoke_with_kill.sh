#!/bin/sh
# Runs a smoke profile, and kills a worker by SIGKILL in the middle of an update:
#   sh deploy/smoke_with_kill.sh PROFILE [SERVICE]      SERVICE: whose container loses its worker [worker]
# COMPOSE is the command, `docker compose` unless given. Exits with 0 if the smoke passed. `down` is left to you.
set -eu
profile=$1
service=${2:-worker}
compose="${COMPOSE:-docker compose} --profile $profile"

# Kills every process of the container but its init, which then ends with an error. So the policy `restart: on-failure`
# starts the container again. After `docker kill` it would not, because that counts as a stop by hand.
kill_worker() {
    $compose exec -T "$service" python -c 'import os; os.kill(-1, 9)' </dev/null >/dev/null 2>&1 || true
}

RL_PLANE_SMOKE_KILL=1 $compose run --rm -T "$profile" 2>&1 | {
    status=1
    while IFS= read -r line; do
        printf '%s\n' "$line"
        case $line in
        *'kill a worker now'*) kill_worker ;;
        'smoke: passed'*) status=0 ;;
        esac
    done
    exit "$status"
}
