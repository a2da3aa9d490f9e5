# Thin names only: every command is a function of tools/course.py, which also runs without make.
# Another Python: make lab PYTHON=python3.12. Further arguments: make test ARGS="tests -q".

PYTHON ?= python3
COMMANDS := help lab test refresh exercises bench checkpoints lint clean

.PHONY: $(COMMANDS)
.DEFAULT_GOAL := help

$(COMMANDS):
	@$(PYTHON) tools/course.py $@ $(ARGS)
