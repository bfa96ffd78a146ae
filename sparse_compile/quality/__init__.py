"""Quality: tasks whose answers are known, and text that the demo model never saw."""
