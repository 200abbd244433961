"""Personal models: each client is evaluated on its own held-out digits, with the shared model or with its own."""

import keel

METHODS = {
    "FedAvg": {"name": "fedavg"},
    "FedPer, the last layer is personal": {"name": "fedper"},
    "Ditto, pulled towards the shared model": {"name": "ditto", "lambda_": 0.1},
    "each client alone": {"name": "ditto", "lambda_": 0.0},
}
for label, algorithm in METHODS.items():
    spec = {
        "algorithm": algorithm,
        "rounds": 30,
        "data": {"clients": 50, "alpha": 0.5},
        "local": {"lr": 0.3},
        "server": {"lr": 1.0},
        "participation": {"rate": 0.2},
        "evaluation": {"every": 30, "last": 1, "clients": 50},
    }
    clients = keel.run(spec).records[-1]["clients"]
    print(f"{label}: mean {clients['mean']:.3f}, worst decile {clients['worst_decile']:.3f}")
