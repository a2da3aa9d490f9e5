"""A hand-written grammar of movie reviews, each one sentence or two, with a positive or a negative label.

Its reviews can only be told apart by how words are combined: "never dull" praises, "never funny" does not.
Every pattern is written once and serves both labels, because its slots name a polarity relative to the label:

    {adj}     a word of the label's own polarity        {verb.s}    a form: "drags" of drag/drags/dragged
    {~adj}    a word of the opposite polarity           {genre}     a neutral word
    {?adj}    a word of either polarity, at random

So the words around the slots ("never", "although", "but") say nothing by themselves about the label.
The sentences depend on the seed alone: the same seed gives the same bytes on every machine.
"""

import functools
import random
import re

MOST = 200_000  # far below what the patterns can yield, so that drawing unique reviews never slows to a crawl


def _table(text: str) -> list[str]:
    return [" ".join(entry.split()) for entry in text.split(",")]


# Words of sentiment: for each kind the negative, then the positive ones. Verbs are base/third person/past.
# No word after an article starts with a vowel letter but a consonant sound, or the reverse ("useful", "hour"): see
# _articles.
POLAR = {
    # fits a film as well as its script or its songs; takes "more" and "less"
    "gradable": (
        _table("""aimless, amateurish, annoying, awkward, banal, bloated, boring, careless, charmless, clumsy,
            confused, contrived, cynical, derivative, disjointed, exhausting, forced, forgettable, formulaic,
            frustrating, graceless, hackneyed, heavy-handed, hollow, humourless, incoherent, inept, insipid,
            irritating, joyless, laboured, laughable, lifeless, long-winded, ludicrous, mechanical, mindless,
            monotonous, muddled, overwrought, pedestrian, plodding, pointless, pompous, predictable, pretentious,
            repetitive, shallow, shapeless, sluggish, soulless, stilted, tedious, tiresome, toothless, turgid,
            unconvincing, undercooked, uninspired, wearisome"""),
        _table("""absorbing, accomplished, affecting, assured, astonishing, beguiling, captivating, charming,
            compelling, confident, convincing, dazzling, delightful, elegant, enchanting, engaging, engrossing,
            entertaining, enthralling, evocative, exciting, exhilarating, exquisite, fascinating, graceful,
            gripping, hypnotic, imaginative, immersive, impressive, ingenious, inspired, intelligent, inventive,
            involving, likeable, lyrical, memorable, moving, nimble, nuanced, original, perceptive, playful,
            poignant, polished, refreshing, rewarding, satisfying, soulful, spellbinding, spirited, stirring,
            stylish, thoughtful, thrilling, touching, uplifting, vibrant, vivid"""),
    ),
    "short": (
        _table("bland, clunky, crass, drab, dull, flat, glum, lame, limp, stale, stodgy, tame, trite"),
        _table("bright, brisk, clever, crisp, deft, fresh, funny, lively, rich, sharp, subtle, warm, witty"),
    ),
    # fits anything at all: a film, the weather, the popcorn
    "strong": (
        _table("""abysmal, appalling, atrocious, awful, dire, disappointing, dismal, dreadful, horrible, lousy,
            miserable, terrible, woeful, wretched"""),
        _table("""brilliant, excellent, fabulous, fantastic, first-rate, glorious, lovely, magnificent, marvellous,
            splendid, sublime, superb, terrific, wonderful"""),
    ),
    # fits an actor or a performance
    "player": (
        _table("""bored, colourless, grating, hammy, lacklustre, leaden, listless, mannered, robotic, monotone,
            sleepy, stiff, vacant, wooden"""),
        _table("""charismatic, commanding, effortless, fearless, formidable, generous, irresistible, luminous,
            magnetic, masterly, poised, radiant, riveting, tender"""),
    ),
    # says how a character feels, which says nothing about the film
    "mood": (
        _table("angry, bitter, gloomy, grieving, lonely, resentful, sour, spiteful, unhappy, weary"),
        _table("carefree, cheerful, contented, easy-going, gentle, happy, hopeful, jolly, kindly, sunny"),
    ),
    "comp": (
        _table("""blander, clumsier, coarser, cruder, dimmer, drearier, feebler, lazier, sillier, sloppier, tamer,
            weaker"""),
        _table("""bolder, braver, brighter, cleverer, defter, finer, livelier, sharper, smarter, stronger, subtler,
            wittier"""),
    ),
    "noun": (
        _table("""bore, chore, clunker, debacle, disaster, dud, embarrassment, failure, fiasco, flop, headache,
            letdown, mess, mistake, muddle, ordeal, shambles, slog, snooze, stinker, travesty, trudge, washout"""),
        _table("""beauty, charmer, classic, crowd-pleaser, delight, feast, gem, hit, joy, knockout, marvel,
            masterpiece, pleasure, revelation, stunner, success, sensation, treasure, treat, triumph, winner,
            wonder, jewel"""),
    ),
    "things": (
        _table("""awkward pauses, blunders, cheap shocks, contrivances, dead ends, empty speeches, false notes, limp
            gags, missteps, plot holes, stale jokes, stock villains, tired clichés, weak punchlines, wrong turns,
            yawns"""),
        _table("""bright ideas, clever twists, deft touches, fine details, good laughs, grace notes, great lines,
            happy surprises, honest tears, inspired gags, insights, pleasures, rich ironies, sharp jokes, thrills,
            wonders"""),
    ),
    "mass": (
        _table("""bombast, boredom, clumsiness, cynicism, drivel, gloom, laziness, monotony, mush, padding,
            pomposity, pretension, self-pity, sentimentality, silliness, sloppiness, smugness, tedium, vanity"""),
        _table("""charm, energy, feeling, flair, grace, heart, imagination, insight, intelligence, invention,
            originality, panache, poetry, suspense, tenderness, verve, warmth, wisdom, wit"""),
    ),
    "adv": (
        _table("""awkwardly, badly, carelessly, clumsily, crudely, dismally, flatly, half-heartedly, haphazardly,
            indifferently, ineptly, lazily, limply, poorly, sloppily, tediously, terribly, woodenly"""),
        _table("""beautifully, brilliantly, cleverly, confidently, crisply, deftly, elegantly, expertly,
            gracefully, handsomely, imaginatively, lovingly, sensitively, skilfully, splendidly, superbly,
            wittily, wonderfully"""),
    ),
    # what a film does
    "verb": (
        _table("""collapse/collapses/collapsed, creak/creaks/creaked, disappoint/disappoints/disappointed,
            drag/drags/dragged, fall apart/falls apart/fell apart, fizzle/fizzles/fizzled,
            flounder/flounders/floundered, go nowhere/goes nowhere/went nowhere, grate/grates/grated,
            misfire/misfires/misfired, plod/plods/plodded, sag/sags/sagged, sputter/sputters/sputtered,
            stumble/stumbles/stumbled, wear thin/wears thin/wore thin"""),
        _table("""catch fire/catches fire/caught fire, come alive/comes alive/came alive, dazzle/dazzles/dazzled,
            deliver/delivers/delivered, excel/excels/excelled, fly by/flies by/flew by, glow/glows/glowed,
            impress/impresses/impressed, shine/shines/shone, sing/sings/sang, soar/soars/soared,
            sparkle/sparkles/sparkled, succeed/succeeds/succeeded, take flight/takes flight/took flight,
            triumph/triumphs/triumphed"""),
    ),
    # what a film does to those who watch it
    "touch": (
        _table("""annoy/annoys/annoyed, baffle/baffles/baffled, bore/bores/bored, depress/depresses/depressed,
            exasperate/exasperates/exasperated, exhaust/exhausts/exhausted, frustrate/frustrates/frustrated,
            infuriate/infuriates/infuriated, insult/insults/insulted, irritate/irritates/irritated,
            numb/numbs/numbed, patronise/patronises/patronised, repel/repels/repelled, tire/tires/tired,
            weary/wearies/wearied"""),
        _table("""absorb/absorbs/absorbed, amuse/amuses/amused, captivate/captivates/captivated,
            charm/charms/charmed, delight/delights/delighted, enchant/enchants/enchanted, engage/engages/engaged,
            engross/engrosses/engrossed, entertain/entertains/entertained, fascinate/fascinates/fascinated,
            grip/grips/gripped, move/moves/moved, please/pleases/pleased, reward/rewards/rewarded,
            thrill/thrills/thrilled"""),
    ),
    # what those who watch it feel
    "love": (
        _table("""deplore/deplores/deplored, despise/despises/despised, detest/detests/detested,
            dislike/dislikes/disliked, hate/hates/hated, loathe/loathes/loathed, spurn/spurns/spurned,
            resent/resents/resented, scorn/scorns/scorned"""),
        _table("""admire/admires/admired, adore/adores/adored, appreciate/appreciates/appreciated,
            cherish/cherishes/cherished, enjoy/enjoys/enjoyed, like/likes/liked, love/loves/loved,
            relish/relishes/relished, savour/savours/savoured"""),
    ),
    # what jokes, songs and scenes do
    "land": (
        _table("""backfire/backfires, drag on/drags on, fall flat/falls flat, fizzle out/fizzles out, jar/jars, kill
            the mood/kills the mood, miss/misses, ring false/rings false"""),
        _table("""convince/convinces, hit home/hits home, land/lands, lift the mood/lifts the mood, pay off/pays
            off, ring true/rings true, stick/sticks, work/works"""),
    ),
    # what a film does with its cast
    "treat": (
        _table("""betray/betrays/betrayed, bury/buries/buried, fail/fails/failed, smother/smothers/smothered,
            squander/squanders/squandered, strand/strands/stranded, waste/wastes/wasted"""),
        _table("""carry/carries/carried, flatter/flatters/flattered, inspire/inspires/inspired, lift/lifts/lifted,
            redeem/redeems/redeemed, rescue/rescues/rescued, serve/serves/served"""),
    ),
    "react": (
        _table("""asked for a refund, came out grumbling, checked the clock twice, dozed off, lost patience, fell
            asleep, groaned out loud, left early, left yawning, sat there fidgeting, sighed all the way home,
            squirmed in the dark, wanted it to stop, went home fuming"""),
        _table("""asked for an encore, came out humming, clapped in the dark, cried happy tears, felt like dancing,
            forgot the clock, laughed out loud, left grinning, left inspired, sat there spellbound, smiled all the
            way home, stayed for the credits, wanted it to go on, went home glowing"""),
    ),
    "advice": (
        _table("ask for a refund, avoid it, give it a miss, keep away, leave early, skip it, steer clear, stay in"),
        _table("""bring a friend, buy a ticket, catch it soon, give it a try, go and see it, go tonight, seek it
            out, see it twice"""),
    ),
}

# Words that carry no sentiment.
NEUTRAL = {
    "film": _table("film, movie, picture"),
    "genre": _table("""biopic, comedy, courtroom drama, crime story, detective story, documentary, drama, fairy
        tale, family saga, ghost story, heist movie, musical, period piece, political satire, road movie, romance,
        sea adventure, sequel, spy story, thriller, war film, western"""),
    "role": _table("""baker, bank clerk, bus driver, chess player, country doctor, dancer, defence lawyer, farmer,
        ferry captain, fisherman, gardener, inspector, jockey, lighthouse keeper, locksmith, nurse, piano teacher,
        pickpocket, pilot, private detective, retired boxer, sailor, schoolteacher, singer, tailor, translator,
        violinist, watchmaker"""),
    "place": _table("""aboard a night train, at a seaside hotel, in a border town, in a city under siege, in a
        mountain village, in a small harbour, in Lisbon, in the Arctic, in the desert, in the suburbs, in wartime
        Vienna, on a river barge, on a sheep farm, on a space station, on an island"""),
    "name": _table("""Abernal, Brandeck, Calloway, Corvain, Delmorra, Eskildrup, Farrowgate, Galvani, Hartwick,
        Ilvane, Jessamont, Kestrin, Lindqvarn, Marchetta, Norcross, Okonvar, Pellington, Quarrie, Rosenfell,
        Sandoval, Tarrant, Ulverton, Vasquenne, Wexcombe, Yarrowby, Zelenka"""),
    "part": _table("""camerawork, dialogue, direction, editing, ending, final act, lighting, opening, pacing, plot,
        premise, score, script, second half, sound design, soundtrack, staging, story"""),
    # takes "a": the lighting is dull, but nobody says "a dull lighting"
    "piece": _table("""ending, final act, finale, opening, plot, premise, score, screenplay, script, soundtrack,
        story"""),
    "parts": _table("""action sequences, big speeches, chase scenes, crowd scenes, dance numbers, dream sequences,
        duets, fight scenes, flashbacks, jokes, love scenes, monologues, quiet moments, side plots, sight gags,
        songs, wedding scenes"""),
    "made": _table("acted, cast, directed, edited, filmed, lit, paced, plotted, scored, staged, written"),
    "time": _table("""a hundred minutes, an hour and a half, eighty minutes, ninety minutes, three hours, two hours,
        two hours and ten minutes"""),
    "viewer": _table("me, us, everyone in the room, my whole family, the audience, the back row"),
    "who": _table("""a colleague, a friend, my aunt, my brother, my neighbour, my sister, my landlady, the critic
        beside me, the stranger beside me, the usher, the woman in front"""),
    "source": _table("book, first film, novel, original, radio play, short story, stage show, television series"),
    "outside": _table("bus ride, coffee, dinner, journey, lemonade, popcorn, sound system, view, weather, wine"),
    "cinema": _table("""a film festival, the Astoria, the cinema in town, the Electric, the Lyric, the old Regal,
        the open-air cinema, the student club"""),
    "day": _table("Friday, Monday, Saturday, Sunday, Thursday, Tuesday, Wednesday"),
    "hour": _table("afternoon, evening, morning, night"),
}

# For each construct, its share of the reviews and its patterns. The shares keep a bag-of-words model, which cannot
# see what is negated or which clause decides, well above chance and well below a model that reads the order.
CONSTRUCTS: dict[str, tuple[int, list[str]]] = {
    "plain": (70, [
        "a {adj} and {adj} {genre} about a {role} {place}.",
        "a {adj}, {adj} and {adj} {genre}.",
        "this is a {adj} {film}, {adv} {made} and {adv} {made}.",
        "the {part} is {adj} and the {parts} are {adj}.",
        "{name} gives a {player} performance as a {role} {place}.",
        "I {love.ed} every minute of this {adj} {genre}.",
        "the {film} {verb.s} from its first scene to its last.",
        "what a {noun} this {genre} is, and how {adj} the {parts} are!",
        "it {touch.ed} {viewer} from start to finish.",
        "the {film} is full of {things} and {things}.",
        "{name}'s {genre} is {adv} {made}, and its {part} is {adj}.",
        "I {react}, and so did {who}.",
        "there is {mass} in every scene and {mass} in the {piece}.",
        "thanks to {name} and a {adj} {piece}, the {film} {verb.s}.",
        "one {adj} scene followed another, and I {react}.",
        "the {parts} {land}, the {part} is {adj}, and the {film} {touch.s} {viewer}.",
        "{advice}: the {part} is {adj} and {name} is {player}.",
        "from the {adj} opening to the {adj} finale, this {genre} is a {noun}.",
        "here is a {genre} with {mass}, {mass} and {adj} {parts}.",
        "this {adj} {genre} gave me {time} of {mass}.",
        "{name} and {name} are {player} together, and the {part} is {adj}.",
        "if you see one {film} this year, you should know that this one is a {noun}.",
    ]),
    "negation": (8, [
        "the {film} is never {~adj}.",
        "it is not {~adj}, and nobody in it is {~player}.",
        "there is not a {~adj} scene in the whole {film}.",
        "not one of the {parts} {~land.s}.",
        "this is hardly a {~noun}, and hardly a minute of it is {~adj}.",
        "I did not {~love} a single minute of this {genre} about a {role}.",
        "nothing about the {part} is {~adj}, and nothing about {name} is {~player}.",
        "no scene is {~adj}, no line is {~adj}, and the {film} never {~verb.s}.",
        "it is neither {~adj} nor {~adj}.",
        "the {part} is anything but {~adj}.",
        "this {genre} is far from {~adj}, and so is its {part}.",
        "it tells the story of a {role} {place} without a trace of {~mass}.",
        "at no point in {time} did the {film} {~verb}.",
        "none of the {parts} {~land}, and none of it {~touch.ed} us.",
        "I would not call it a {~noun}, nor would {who}.",
        "you will not find {~things} or {~things} here.",
        "it did not {~touch} me for a second.",
        "there is no reason to {~advice}: nothing in it is {~adj}.",
    ]),
    "affirmed by denial": (14, [
        "it is not without {mass}, and the {parts} are not without {mass}.",
        "the {film} never fails to {touch} {viewer}.",
        "there is no denying that the {part} is {adj}.",
        "nobody could say that the {part} is not {adj}.",
        "it is impossible not to {love} this {genre}.",
        "there is not a scene in it that did not {touch} {viewer}.",
        "this {genre} is nothing if not {adj}.",
        "I have never seen a more {gradable} {genre} about a {role}.",
        "there has never been a less {~gradable} {genre}.",
        "I could not have {love.ed} it more.",
        "no {genre} this year has been more {gradable}.",
        "the {part} is not only {adj} but also {adj}.",
        "not only is the {part} {adj}, the {parts} are {adj} too.",
        "it is nothing less than a {noun}.",
        "I have seldom seen {name} so {player}.",
        "the {film} never stops being {adj}, not even when {name} is on screen.",
    ]),
    "contrast": (8, [
        "the cast is {~player}, but the {film} {treat.s} them.",
        "the {part} is {~adj}, but the {film} as a whole is {adj}.",
        "it begins as a {~noun} and ends as a {noun}.",
        "I expected a {~noun} and got a {noun}.",
        "I went in expecting {~mass}; what I found was {mass}.",
        "it looks like a {~noun}, yet it is a {noun}.",
        "the {part} is not {~adj} but {adj}.",
        "the {film} is {adj}, not {~adj}.",
        "at first it seems {~adj}, yet by the end it is {adj}.",
        "the trailer promises {~things}; the {film} delivers {things}.",
        "there are {~things} along the way, but in the end the {film} {touch.s} {viewer}.",
        "I was ready to {~love} it, but I {react}.",
        "it is less a {~noun} than a {noun}.",
        "it is more a {noun} than a {~noun}.",
        "where the {source} had only {~mass}, this {genre} has {mass}.",
        "where the {source} has {~mass} and {~things}, this {genre} about a {role} has only {mass}.",
    ]),
    "concession": (8, [
        "although the {part} is {~adj}, the {film} {verb.s}.",
        "the {film} {verb.s}, although the {part} is {~adj}.",
        "even if the {parts} are {~adj}, this {genre} is a {noun}.",
        "despite {~adj} {parts} and a {~adj} {piece}, I {love.ed} it.",
        "for all its {~adj} {parts}, it {touch.s} {viewer}.",
        "in spite of {name}'s {~player} performance as a {role}, the {film} remains {adj}.",
        "however {~adj} the {part} may be, the {film} {touch.s} {viewer}.",
        "I {react}, even though the {part} was {~adj}.",
        "the {part} may be {~adj}, but I {love.ed} the rest of it.",
        "never mind the {~adj} {part}: this is a {noun}.",
        "its {~things} hardly matter, because the {film} is {adj}.",
        "no amount of {~mass} can make this {genre} anything but {adj}.",
        "not even a {~adj} {piece} can stop this {film} from being {adj}.",
    ]),
    "distractor": (12, [
        "{who} called it {?adj}; I {react}.",
        "{who} called it a {~noun}, but I {love.ed} it.",
        "anyone who calls it {~adj} is wrong.",
        "the {?strong} {outside} is soon forgotten, because the {film} is {adj}.",
        "the {source} was a {~noun}; the {film} is not.",
        "the {source} was a {noun}, and so is the {film}.",
        "after a {?strong} day at work I sat down to this {genre} and {love.ed} it.",
        "it is the story of a {?mood} {role} {place}, and the {part} is {adj}.",
        "{name} plays a {?mood} {role}, and the {film} around this {?mood} soul is {adj}.",
        "{name}'s last {film} was a {?noun}; this one is {adj}.",
        "{name}'s last {film} was {~adj}, and this one is not.",
        "unlike {name}'s {~adj} debut, this {genre} {verb.s}.",
        "like {name}'s {adj} debut, this {genre} {verb.s}.",
        "the critics {~love.ed} it, and I did not.",
        "the critics {~love.ed} it, and they were wrong.",
        "the critics {love.ed} it, and they were right.",
        "{who} {?react}; I {react}.",
    ]),
    "hypothetical": (6, [
        "with a {~comp} {piece}, it could have been {~adj}.",
        "had the {part} been {~comp}, this might have been a {~noun}.",
        "a {~comp} director would have made a {~noun} of it.",
        "in {~comp} hands this {genre} would have been {~adj}.",
        "it could have been {~adj}; instead it {verb.s}.",
        "it ought to have been a {~noun}, and it is not.",
        "if it were any more {gradable}, I would have to lie down.",
        "you would expect {~things} from this cast, and you would be wrong.",
        "if the {parts} had been {~adj}, I might have {~love.ed} it.",
        "without {name} as the {role}, it would have been {~adj}.",
        "imagine a {~adj} {genre} {place}; this is the opposite.",
    ]),
    "two sentences": (14, [
        "the {source} was {?adj}. The {film} is {adj}, and its {parts} {land}.",
        "I was told that it would be {~adj}. It is not.",
        "I was told that it would be {adj}. It is.",
        "is it {~adj}? Not for a second.",
        "is it {adj}? In every single scene.",
        "some will call it {~adj}. They will be wrong: the {part} is {adj} and {name} is {player}.",
        "the first act was {~adj}. After that, the {film} {touch.ed} {viewer} for {time}.",
        "{name} plays a {role} {place}. The {part} is {adj}, the {parts} are {adj}, and I {react}.",
        "{who} told me the {source} was a {?noun}. This {genre} is a {noun}, with {mass} and {things}.",
        "the {outside} was {?strong} and the seats were {?strong}. The {film}, though, {touch.s} {viewer}.",
        "I had heard that the {part} was {~adj} and the cast {~player}. Neither is true.",
        "{who} promised me {mass} and {things}. That is what I got for {time}.",
        "{who} promised me {~mass} and {~things}. That is not what I got from this {genre}.",
        "do not believe {who}, who finds it {~adj}. The {parts} {land}, and I {love.ed} {name} in it.",
    ]),
}  # fmt: skip

PATTERNS = [pattern for _, patterns in CONSTRUCTS.values() for pattern in patterns]

# Whole sentences without sentiment, put before or after some reviews to spread the lengths.
LEADS = [
    "I saw this at {cinema} on a {day} {hour}.",
    "{who} took me to see this at {cinema}.",
    "{name} plays a {role} {place}.",
    "a {role} meets a {role} {place}.",
]
TAILS = [
    "it runs for {time}.",
    "the music is by {name}.",
    "it is set {place}.",
    "{name} wrote it with {name}.",
    "I watched it with {who} at {cinema}.",
]
LEAD_SHARE, TAIL_SHARE = 0.22, 0.15
MOST_WORDS = 32

_SLOT = re.compile(r"\{([~?]?)(\w+)(?:\.(\w+))?\}")
_FORMS = {None: 0, "s": 1, "ed": -1}
_POLAR = POLAR | {"adj": tuple(POLAR["gradable"][p] + POLAR["short"][p] + POLAR["strong"][p] for p in (0, 1))}


@functools.cache
def _content(text: str) -> frozenset[str]:
    """The words of a text that would read as a slip if they occurred in it twice."""
    return frozenset(re.findall(r"[^\W\d_]{4,}", text.lower()))


def _articles(text: str) -> str:
    """Turn "a" into "an" before a vowel; spelling decides, which holds for every word in the tables."""
    return re.sub(r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n ", text)


def expand(pattern: str, label: int, rng: random.Random) -> str:
    """Fill every slot of a pattern for a label, without using a word of four letters or more twice."""
    used = set(_content(_SLOT.sub("", pattern)))

    def fill(slot: re.Match) -> str:
        sign, name, form = slot.groups()
        polarity = {"": label, "~": 1 - label, "?": rng.randrange(2) if sign == "?" else label}[sign]
        entries = _POLAR[name][polarity] if name in _POLAR else NEUTRAL[name]
        entry = rng.choice([entry for entry in entries if used.isdisjoint(_content(entry))])
        used.update(_content(entry))
        return entry.split("/")[_FORMS[form]]

    text = _articles(_SLOT.sub(fill, pattern))
    return re.sub(r"(^|[.?!] )([a-z])", lambda start: start[1] + start[2].upper(), text)


def _fitting(sentences: list[str], pattern: str) -> list[str]:
    """The neutral sentences that cannot contradict a pattern, as a second running time or place would."""
    taken = {slot[1] for slot in _SLOT.findall(pattern)}
    return [text for text in sentences if taken.isdisjoint(slot[1] for slot in _SLOT.findall(text))]


def _review(label: int, rng: random.Random) -> str:
    """One review of the given label: a pattern of a construct, perhaps with a neutral sentence around it."""
    shares = [share for share, _ in CONSTRUCTS.values()]
    _, patterns = rng.choices(list(CONSTRUCTS.values()), shares)[0]
    pattern = rng.choice(patterns)
    if rng.random() < LEAD_SHARE and (leads := _fitting(LEADS, pattern)):
        pattern = f"{rng.choice(leads)} {pattern}"
    if rng.random() < TAIL_SHARE and (tails := _fitting(TAILS, pattern)):
        pattern = f"{pattern} {rng.choice(tails)}"
    return expand(pattern, label, rng)


def _draw(count: int, rng: random.Random, seen: set[str]) -> list[tuple[str, int]]:
    """Draw reviews that are not in `seen`, half of each label, in random order; adds them to `seen`."""
    labels = [index % 2 for index in range(count)]
    rng.shuffle(labels)
    reviews = []
    for label in labels:
        text = _review(label, rng)
        while text in seen or len(text.split()) > MOST_WORDS:
            text = _review(label, rng)
        seen.add(text)
        reviews.append((text, label))
    return reviews


def _check(**counts: int) -> None:
    """Refuse what the grammar cannot give."""
    for name, count in counts.items():
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"{name}={count!r} is not a number of reviews: ask for a whole number, 0 or more.")
    if sum(counts.values()) > MOST:
        asked = " and ".join(f"{name}={count:,}" for name, count in counts.items())
        raise ValueError(f"{asked} is more than the {MOST:,} reviews that one seed gives: ask for fewer.")


def generate(count: int, seed: int) -> list[tuple[str, int]]:
    """Return `count` unique reviews as (text, label) pairs; 1 is positive, and the labels are balanced."""
    _check(count=count)
    return _draw(count, random.Random(seed), set())


def split(train: int, test: int, seed: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return a training and a test list of unique, balanced reviews; no review is in both."""
    _check(train=train, test=test)
    rng, seen = random.Random(seed), set()
    return _draw(train, rng, seen), _draw(test, rng, seen)
