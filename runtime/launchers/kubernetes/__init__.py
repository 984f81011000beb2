"""Jobs on Kubernetes: Indexed Jobs in one namespace, and a record root on a claim."""
