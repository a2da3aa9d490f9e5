## make lab          open the course in JupyterLab; the first call sets up .venv
## make test         run every test and notebook (pytest --nbval)
## make check        run only the notebooks and tests that a change may have touched
## make refresh      run changed notebooks again, or those named in ARGS="...", and store their outputs
## make doubt        plant small faults in lessons and count what catches them: a claim, the comparison, or nothing
## make again        run each cell of the lessons twice, as a reader does with another guess; ARGS=--from-the-top: all, then all
## make exercises    generate the exercises from the solutions
## make site         build the course as web pages in build/site; ARGS=--check looks at every page in Chromium
## make present      rehearse a lesson, open a live copy, serve its slides: make present UNIT=9.1.1
## make bench        climb the ladders on this machine and store the measurements
## make checkpoints  train the small checkpoints of the course again
## make hosted       write notebooks for Colab and Kaggle, and links to hosted platforms: make hosted REPO=owner/name
## make lint         check the style of code and notebooks
## make clean        remove .venv, caches and build leftovers
##
## More arguments: make test ARGS="tests -q". A different Python: make clean, then make lab PYTHON=python3.13.
## To choose where PyTorch comes from: make lab TORCH_BACKEND=cpu, or cu130, or registry.

PYTHON ?= python3
COURSE := @$(PYTHON) tools/course.py
COMMANDS := help lab test check refresh doubt again exercises site present bench checkpoints hosted lint clean
.PHONY: $(COMMANDS)

help:
	@sed -n 's/^##[ ]*//p' Makefile
lab test:
	$(COURSE) $@ $(ARGS)
check refresh doubt again exercises:
	$(COURSE) run tools/$@.py $(ARGS)
site:
	$(COURSE) run tools/website.py $(ARGS)
present:
	$(COURSE) run tools/present.py $(UNIT) $(ARGS)
bench:
	$(COURSE) run -m benchmarks.ladder $(ARGS)
checkpoints:
	$(COURSE) run tools/pretrain_vit.py $(ARGS)
	$(COURSE) run tools/pretrain_distilbert.py $(ARGS)
hosted:
	$(COURSE) run tools/hosted.py $(if $(REPO),--repo $(REPO)) $(ARGS)
	$(COURSE) run tools/readme.py
lint:
	$(COURSE) run -m ruff check . $(ARGS)
	$(COURSE) run -m ruff format --check . $(ARGS)
clean:
	rm -rf .venv/set-up .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache
	find . -name .git -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
