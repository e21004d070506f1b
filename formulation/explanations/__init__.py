"""Why a job runs, waits or was changed, and what would help: values, changes and words."""
