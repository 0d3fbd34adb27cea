#!/bin/sh
# `serve [OPTIONS]` serves the artifact mounted at $NXD_INFER_ARTIFACT (SageMaker mounts it at /opt/ml/model);
# anything else is passed to nxd-infer as it is.
set -eu
if [ "${1:-serve}" = "serve" ]; then
    shift || true
    if [ -n "${NXD_ARTIFACT:-}" ]; then
        echo "error: NXD_ARTIFACT is NXD_INFER_ARTIFACT now; rename what sets it" >&2
        exit 1
    fi
    exec nxd-infer serve "${NXD_INFER_ARTIFACT:-/opt/ml/model}" --host 0.0.0.0 --port "${PORT:-8080}" "$@"
fi
exec nxd-infer "$@"
