"""Start a task, the same as `kvcompress new-task`: python scripts/new_task.py LastBox"""

from kvcompress.commands.new_task import main

if __name__ == "__main__":
    raise SystemExit(main())
