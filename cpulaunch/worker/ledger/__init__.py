"""Which mode runs a module's calls: a choice by the durations of the program's own calls."""
