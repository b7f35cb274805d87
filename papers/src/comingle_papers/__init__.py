"""The papers behind comingle: published tables and figures run again, theory, tasks and nets."""
