"""A page in Chromium that notes what goes wrong in it."""


def opened(browser, base: str, scheme: str = "light", width: int = 1280, **options):
    """A page that notes what goes wrong: what it asks for outside of `base`, errors, answers that are none."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
    page, wrong = context.new_page(), []
    page.on("request", lambda asked: asked.url.startswith((base, "data:", "blob:")) or wrong.append(asked.url))
    page.on("console", lambda said: said.type == "error" and wrong.append(said.text[:200]))
    page.on("pageerror", lambda error: wrong.append(str(error)[:200]))
    page.on("response", lambda answer: answer.status >= 400 and wrong.append(f"{answer.status} {answer.url}"))
    context.route(lambda url: not url.startswith(base), lambda route: route.abort())
    return page, wrong
