# ruff: noqa: E501 (tables of prose)
"""Writes prompts for a training run: everyday questions, explanations, lists, small code, arithmetic, short writing.

    python configs/train/make_prompts.py --count 80000 --seed 0 > prompts.jsonl

Each line is {"prompt": …, "category": …}; all differ.  Some are the lines of `prompts/`, as they stand or with a few words
around them; others are made from the sentence patterns and things below, so the draft meets each pattern with many
contents and each thing in many patterns.  None of them stands in the evaluation prompts beside this file.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

SUBJECTS = """
photosynthesis; gravity; the water cycle; plate tectonics; volcanoes; earthquakes; black holes; the solar system;
the moon; eclipses; tides; rainbows; lightning; hurricanes; climate change; the greenhouse effect; evolution;
natural selection; DNA; cells; bacteria; viruses; the immune system; vaccines; antibiotics; the human heart; the brain;
digestion; sleep; dreams; memory; the nervous system; genes; proteins; vitamins; blood pressure; diabetes; asthma;
allergies; exercise; meditation; stress; anxiety; nutrition; calories; atoms; molecules; chemical bonds; acids and bases;
the periodic table; oxidation; electricity; magnetism; light; sound waves; heat; energy; nuclear power; solar panels;
wind turbines; batteries; semiconductors; transistors; computers; operating systems; the internet; Wi-Fi; Bluetooth;
encryption; passwords; databases; cloud computing; machine learning; neural networks; artificial intelligence; robots;
3D printing; virtual reality; blockchain; search engines; social media; email; smartphones; digital cameras; satellites;
rockets; telescopes; microscopes; airplanes; bicycles; steam engines; electric cars; trains; ships; bridges; concrete;
glass; steel; plastic; paper; cotton; wool; leather; rubber; oil; natural gas; coal; water treatment; recycling; compost;
farming; irrigation; soil; bees; pollination; forests; deserts; oceans; rivers; lakes; coral reefs; glaciers; mountains;
caves; islands; the Arctic; the Amazon rainforest; wolves; elephants; whales; dolphins; sharks; octopuses; penguins; owls;
eagles; butterflies; spiders; ants; snakes; frogs; horses; cats; dogs; cows; chickens; dinosaurs; fossils; mammals; birds;
reptiles; fish; insects; trees; flowers; mushrooms; democracy; constitutions; elections; human rights; taxes; inflation;
interest rates; the stock market; supply and demand; budgets; insurance; mortgages; banks; money; trade; globalization;
unions; the Industrial Revolution; the Renaissance; the Roman Empire; ancient Egypt; ancient Greece; the Middle Ages;
the French Revolution; the Cold War; World War I; World War II; the Silk Road; the printing press; colonialism; migration;
cities; architecture; painting; sculpture; photography; poetry; novels; theatre; opera; jazz; classical music; rock music;
the piano; the guitar; the violin; rhythm; dance; film; animation; video games; chess; football; basketball; tennis;
swimming; running; yoga; cooking; baking; bread; cheese; chocolate; coffee; tea; rice; pasta; soup; salads; spices; sugar;
salt; olive oil; fermentation; grammar; punctuation; metaphors; languages; translation; writing systems; public speaking;
essays; storytelling; reading; libraries; schools; universities; homework; teamwork; leadership; communication; empathy;
friendship; kindness; honesty; patience; creativity; critical thinking; logic; ethics; philosophy; psychology; sociology;
economics; statistics; probability; algebra; geometry; calculus; prime numbers; fractions; percentages; the scientific method;
gardening; houseplants; camping; hiking; travel; maps; compasses; time zones; calendars; clocks; weather forecasts; clouds;
snow; fire; first aid; traffic lights; hospitals; museums; zoos; festivals; weddings; holidays; toys; furniture; clothes;
shoes; perfume; soap; toothpaste; refrigerators; microwaves; washing machines; air conditioning; elevators; mirrors; magnets
"""
PLACES = """
France; Germany; Italy; Spain; Portugal; Greece; Norway; Sweden; Finland; Denmark; Poland; Austria; Switzerland; Ireland;
Scotland; England; Russia; Ukraine; Turkey; Egypt; Morocco; Kenya; Nigeria; Ghana; Ethiopia; South Africa; India; Pakistan;
Nepal; China; Japan; South Korea; Vietnam; Thailand; Indonesia; the Philippines; Malaysia; Singapore; Australia;
New Zealand; Canada; Mexico; Brazil; Argentina; Chile; Peru; Colombia; Cuba; Iceland; the Netherlands; Belgium; Hungary;
Croatia; Israel; Iran; Iraq; Saudi Arabia; Mongolia; California; Texas; New York; Paris; London; Rome; Tokyo; Berlin; Madrid
"""
GOALS = """
learn to play the guitar; learn a new language; save money; lose weight; sleep better; read more books; wake up earlier;
write a novel; start a business; find a job; prepare for an interview; write a resume; ask for a raise; make new friends;
train a puppy; care for a cat; grow tomatoes; plant a tree; keep houseplants alive; bake bread; make pizza; cook rice;
boil an egg; make a salad; brew coffee; make tea; bake a chocolate cake; make pancakes; cook pasta; roast vegetables;
clean a kitchen; remove a stain; fold a shirt; iron clothes; fix a leaky faucet; paint a wall; hang a picture; change a tire;
ride a bicycle; swim; run a marathon; do push-ups; meditate; stretch; reduce stress; stay focused; stop procrastinating;
manage time; set goals; study for an exam; take notes; write an essay; give a speech; tell a story; draw a face; take photos;
edit a video; build a website; write a blog; learn Python; debug a program; back up files; choose a laptop;
protect a password; set up Wi-Fi; speed up a computer; pack a suitcase; plan a trip; travel cheaply; camp in the forest;
read a map; plan a party; plan a wedding; choose a gift; write a thank-you note; apologize to a friend; resolve a conflict;
raise children; teach a child to read; help with homework; volunteer; recycle at home; save water; save electricity;
invest money; make a budget; pay off debt; buy a house; rent an apartment; move to a new city; decorate a room;
organize a closet; knit a scarf; sew a button; play chess; solve a puzzle; juggle; whistle; sing; dance; learn to drive
"""
LISTED = """
healthy breakfast foods; fruits; vegetables; board games; card games; outdoor activities; indoor activities; hobbies;
sports; musical instruments; dog breeds; cat breeds; birds; flowers; trees; insects; sea animals; farm animals; wild animals;
planets; metals; gases; colors; shapes; countries in Europe; countries in Africa; countries in Asia; capital cities; rivers;
mountains; oceans; famous inventions; famous paintings; famous books; famous scientists; programming languages;
file formats; search algorithms; data structures; kitchen tools; garden tools; office supplies; school subjects; jobs;
jobs in healthcare; jobs in technology; renewable energy sources; ways to save water; ways to save energy; ways to relax;
ways to stay healthy; ways to make money; ways to learn faster; study tips; time management tips; travel tips; safety tips;
interview questions; icebreaker questions; gift ideas; birthday party ideas; dinner ideas; lunch ideas; snack ideas;
dessert ideas; vegetarian meals; soups; sandwiches; spices; drinks; holidays; traditions; dances; music genres; film genres;
book genres; art styles; synonyms for happy; synonyms for big; words that rhyme with cat; words that rhyme with light;
adjectives; verbs; emotions; good habits; bad habits; qualities of a good friend; qualities of a good leader; virtues;
benefits of reading; benefits of exercise; benefits of walking; benefits of drinking water; benefits of sleep;
causes of stress; causes of World War I; effects of pollution; effects of climate change; uses of salt; uses of vinegar;
uses of a computer; things to pack for a trip; things to do in winter; things to do in summer; things to do on a rainy day
"""
TASKS = """
returns the sum of two numbers; returns the largest number in a list; returns the smallest number in a list;
reverses a string; reverses a list; checks whether a number is prime; checks whether a number is even;
checks whether a string is a palindrome; counts the vowels in a string; counts the words in a sentence;
computes the factorial of a number; computes the nth Fibonacci number; computes the average of a list;
computes the median of a list; finds the greatest common divisor of two numbers; sorts a list of numbers;
sorts a list of strings by length; removes duplicates from a list; merges two sorted lists; merges two dictionaries;
counts how often each word occurs; converts Celsius to Fahrenheit; converts kilometers to miles; converts a string to uppercase;
converts a number to binary; converts minutes to hours and minutes; reads a file and prints its lines; writes a list to a file;
searches a sorted list with binary search; finds the index of an element; finds the longest word in a sentence;
finds the second largest number; finds the common elements of two lists; flattens a nested list; rotates a list;
transposes a matrix; multiplies two matrices; prints a multiplication table; prints the numbers from 1 to 100;
prints a triangle of stars; generates a random password; rolls a die; shuffles a list; simulates a coin toss;
calculates the area of a circle; calculates the area of a rectangle; calculates the area of a triangle; calculates compound interest;
calculates the distance between two points; checks whether a year is a leap year; validates an email address;
removes spaces from a string; capitalizes each word; swaps two variables; splits a sentence into words; joins words with commas;
counts the digits of a number; sums the digits of a number; squares every number in a list; filters the even numbers of a list;
implements a stack; implements a queue; implements a linked list; implements bubble sort; implements a simple calculator;
represents a bank account; represents a student with a name and grades; represents a rectangle; parses a comma-separated line;
"""
CODE_LANGUAGES = ["Python"] * 8 + ["JavaScript", "Java", "C", "C++", "Go", "SQL"]
CAST = """
a young fox; an old sailor; a curious robot; a brave princess; a lost dog; a lonely dragon; a talking tree; a little girl;
two brothers; a clever mouse; a tired teacher; a magical cat; a shy giant; a friendly ghost; a painter; a clockmaker;
a scientist; a farmer; a knight; a baker; an astronaut; a detective; a musician; a grandmother; a wizard; a snail
"""
SETTINGS = """
in a forest; by the sea; on a distant planet; in a small village; in a big city; in the mountains; at night; in winter;
in an old castle; on a train; in a library; at a market; in a garden; under the ocean; in the desert; at school; in space
"""
PEOPLE = ["Anna", "Ben", "Carla", "David", "Ella", "Farid", "Grace", "Hugo", "Ines", "Jack", "Kofi", "Lena", "Maria",
          "Nina", "Omar", "Paul", "Rosa", "Sam", "Tom", "Yuki"]  # fmt: skip
GOODS = ["apples", "books", "pencils", "marbles", "eggs", "tickets", "cookies", "stickers", "oranges", "coins", "cards",
         "bottles", "chairs", "flowers", "candies", "balloons", "shirts", "cups", "stamps", "toys"]  # fmt: skip


def things(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(";") if part.strip()]


SUBJECT, PLACE, GOAL, LIST, TASK = map(things, (SUBJECTS, PLACES, GOALS, LISTED, TASKS))
HERO, SETTING = things(CAST), things(SETTINGS)

QUESTIONS = [
    "What is {subject}?", "What are the main facts about {subject}?", "Why is {subject} important?",
    "How does {subject} work?", "Who first studied {subject}?", "What is the history of {subject}?",
    "What should I know about {subject}?", "Tell me about {subject}.", "Tell me something interesting about {subject}.",
    "What is the difference between {subject} and {subject2}?", "How are {subject} and {subject2} related?",
    "Is {subject} useful in daily life?", "What is the best thing about {subject}?", "Where can I learn about {subject}?",
    "What is the capital of {place}?", "What language is spoken in {place}?", "What is {place} famous for?",
    "What is the weather like in {place}?", "What food is popular in {place}?", "Where is {place}?",
    "What can I see in {place} in three days?", "When is the best time to visit {place}?", "Tell me about {place}.",
    "How can I {goal}?", "How do I {goal}?", "What is the best way to {goal}?", "What do I need to {goal}?",
    "How long does it take to {goal}?", "I want to {goal}. Where should I start?", "Can you help me {goal}?",
    "I have tried to {goal} but failed. What should I do?", "Is it hard to {goal}?", "Why do people {goal}?",
]  # fmt: skip
EXPLANATIONS = [
    "Explain {subject}.", "Explain {subject} in simple terms.", "Explain {subject} to a child.",
    "Explain {subject} in two sentences.", "Explain {subject} in one paragraph.", "Explain how {subject} works.",
    "Explain why {subject} matters.", "Describe {subject}.", "Describe {subject} briefly.", "Define {subject}.",
    "Can you explain {subject} step by step?", "Give me a short introduction to {subject}.", "Summarize {subject}.",
    "What does a beginner need to understand about {subject}?", "Explain the role of {subject} in society.",
    "Compare {subject} and {subject2}.", "Explain the connection between {subject} and {subject2}.",
    "Give an example of {subject} and explain it.", "Explain step by step how to {goal}.",
    "Explain {subject} as if I were ten years old.", "What causes problems with {subject}, and how are they solved?",
]  # fmt: skip
LISTS = [
    "List {n} {listed}.", "Name {n} {listed}.", "Give me a list of {n} {listed}.", "Give me {n} {listed}.",
    "What are {n} {listed}?", "Write down {n} {listed}.", "Make a list of {listed}.", "Can you list some {listed}?",
    "List {n} facts about {subject}.", "Give me {n} reasons to learn about {subject}.", "List the steps to {goal}.",
    "Give me {n} tips to {goal}.", "What are the pros and cons of {subject}?", "List {n} questions about {subject}.",
    "Write a checklist to {goal}.", "List {n} things to do in {place}.", "Suggest {n} {listed} and explain each of them.",
    "List {n} advantages of {subject}.", "Give {n} examples of {listed}, one per line.", "List {n} words about {subject}.",
]  # fmt: skip
CODE = [
    "Write a {language} function that {task}.", "Write a {language} program that {task}.",
    "Write {language} code that {task}.", "How do I write a function in {language} that {task}?",
    "Write a short {language} script that {task}, with comments.", "Show me {language} code which {task}.",
    "Give me a simple {language} example that {task}.", "Write a {language} function that {task} and explain it.",
    "Implement a function in {language} that {task}.", "I need {language} code that {task}. Can you help?",
    "Write a {language} class or function that {task}, and show how to use it.",
]  # fmt: skip
WRITING = [
    "Write a short story about {hero} {setting}.", "Write a poem about {subject}.", "Write a short poem about {hero}.",
    "Write a haiku about {subject}.", "Tell me a story about {hero} who wants to {goal}.",
    "Write a paragraph about {subject}.", "Write an email to a colleague about {subject}.",
    "Write a letter to a friend who wants to {goal}.", "Write a dialogue between {hero} and {hero2}.",
    "Write a short speech about {subject}.", "Write an essay about {subject}.", "Write a product description about {subject}.",
    "Write a tweet about {subject}.", "Write the first sentence of a novel {setting}.", "Write a joke about {subject}.",
    "Write a title and a summary for an article about {subject}.", "Describe a day {setting}.",
]  # fmt: skip
CHAT = [
    "Hi! Can you tell me about {subject}?", "Hello, how are you today?", "I feel tired. How can I {goal}?",
    "I'm bored. Suggest {n} {listed}.", "What do you think about {subject}?", "My friend wants to {goal}. Any advice?",
    "I'm planning to visit {place}. What should I pack?", "I have a test on {subject} tomorrow. Help me prepare.",
    "Please recommend a book about {subject}.", "Good morning! I'd like to {goal} today.", "Is {subject} dangerous?",
    "Teach me something about {subject}.", "Ask me {n} questions about {subject}.", "Thank you! Now explain {subject}.",
    "Rewrite this sentence: \"{Subject} can change how we live.\"", "Translate to French: I want to {goal}.",
    "Correct the grammar: \"me and him wants to {goal}\".", "Make this friendlier: \"You must {goal} now.\"",
    "Summarize in one sentence: {Subject} affects many people, and those who want to {goal} often begin with it.",
]  # fmt: skip


def filled(patterns: list[str]) -> Callable[[random.Random], str]:
    """One of `patterns` with things in its gaps."""

    def make(rng: random.Random) -> str:
        subject, subject2 = rng.sample(SUBJECT, 2)
        hero, hero2 = rng.sample(HERO, 2)
        return rng.choice(patterns).format(
            subject=subject, subject2=subject2, Subject=subject[0].upper() + subject[1:], place=rng.choice(PLACE),
            goal=rng.choice(GOAL), listed=rng.choice(LIST), task=rng.choice(TASK), hero=hero, hero2=hero2,
            setting=rng.choice(SETTING), language=rng.choice(CODE_LANGUAGES),
            n=rng.choice(["three", "four", "five", "5", "ten", "10", "seven", "six"]),
        )  # fmt: skip

    return make


def arithmetic(rng: random.Random) -> str:
    """A sum, a product, a short word problem, …"""
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 12)
    who, other = rng.sample(PEOPLE, 2)
    good, sign = rng.choice(GOODS), rng.choice(["+", "-", "*", "/"])
    return rng.choice([
        f"What is {a} {sign} {b}?", f"Calculate {a} {sign} {b}.", f"What is {a} plus {b}?", f"What is {a} times {c}?",
        f"What is {a} minus {b}?", f"What is {a * c} divided by {c}?", f"Solve {a} + {b} * {c}.",
        f"What is {c * 5}% of {a * 10}?", f"Is {a} a prime number?", f"What is the square of {a}?",
        f"Solve for x: {c}x + {a} = {a + c * b}.", f"Solve the equation x - {a} = {b}.", f"Add {a}, {b} and {c}.",
        f"{who} has {a} {good} and buys {b} more. How many {good} does {who} have now?",
        f"{who} has {a + b} {good} and gives {b} to {other}. How many {good} are left?",
        f"There are {c} boxes with {a} {good} each. How many {good} are there in total?",
        f"{who} shares {a * c} {good} equally among {c} friends. How many {good} does each friend get?",
        f"A train travels at {a} miles per hour for {c} hours. How far does it go?",
        f"One of the {good} costs {c} dollars. How much do {a} {good} cost?",
        f"A rectangle is {a} cm long and {b} cm wide. What is its area?",
        f"{who} works {c} hours a day and earns {a} dollars an hour. How much does {who} earn in {rng.randint(2, 9)} days?",
        f"If {who} reads {a} pages a day, how many pages does {who} read in {c} days?",
        f"Round {a * 37 + b} to the nearest hundred.", f"Convert {a} kilometers to meters.",
        f"What is the average of {a}, {b} and {c}?", f"Write {a * c} as a sum of two numbers.",
    ])  # fmt: skip


def _written(category: str) -> list[str]:
    """The lines of `prompts/CATEGORY….txt`."""
    files = sorted((Path(__file__).parent / "prompts").glob(f"{category}*.txt"))
    return [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]


WRITTEN = {name: _written(name) for name in ("questions", "explanations", "lists", "code", "chat")}
PROBLEMS = _written("arithmetic")
AROUND = {
    "questions": ["Hi! {}", "Hello. {}", "{} Please keep it short.", "{} Answer in one sentence.", "{} Explain briefly.",
                  "I was wondering: {}", "Quick question: {}", "{} Give an example.", "Please answer: {}", "{} Thanks!",
                  "Tell me, {lower}", "{} I am curious.", "{} Explain it to a child.", "My son asked me: {}"],
    "explanations": ["Please {lower}", "Hi! {}", "{} Keep it short.", "{} Use simple words.", "{} Give an example.",
                     "Could you {lower}", "{} Use two paragraphs.", "{} I am a beginner.", "I'd like you to {lower}"],
    "lists": ["Please {lower}", "Hi! {}", "{} Keep it short.", "{} Explain each one briefly.", "Could you {lower}",
              "{} Use bullet points.", "{} Number them.", "{} Only the names, please.", "I need help: {lower}"],
    "code": ["Please {lower}", "Hi! {}", "{} Add comments.", "{} Explain the code.", "{} Keep it simple.",
             "{} Show an example of its use.", "Could you {lower}", "{} I am a beginner.", "{} Only the code, please."],
    "chat": ["Please {lower}", "Hi! {}", "{} Keep it short.", "{} Thank you!", "Could you {lower}", "Hello! {}"],
}  # fmt: skip


def around(category: str) -> Callable[[random.Random], str]:
    """A prompt that we wrote, in other words around it."""

    def make(rng: random.Random) -> str:
        line = rng.choice(WRITTEN[category])
        return rng.choice(AROUND[category]).format(line, lower=line[0].lower() + line[1:])

    return make


def problem(rng: random.Random) -> str:
    """An arithmetic problem with numbers, names and things in its gaps."""
    a, b, c, d = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 12), rng.randint(2, 12)
    who, other = rng.sample(PEOPLE, 2)
    return rng.choice(PROBLEMS).format(
        a=a, b=b, c=c, d=d, ac=a * c, ab=a + b, h=10 * rng.randint(1, 99), p=5 * rng.randint(1, 19), who=who,
        other=other, good=rng.choice(GOODS), op=rng.choice("+-*/"),
    )  # fmt: skip


MAKERS: list[tuple[float, str, Callable[[random.Random], str]]] = [
    (0.06, "questions", filled(QUESTIONS)),
    (0.20, "questions", around("questions")),
    (0.06, "explanations", filled(EXPLANATIONS)),
    (0.13, "explanations", around("explanations")),
    (0.05, "lists", filled(LISTS)),
    (0.12, "lists", around("lists")),
    (0.05, "code", filled(CODE)),
    (0.15, "code", around("code")),
    (0.02, "arithmetic", arithmetic),
    (0.12, "arithmetic", problem),
    (0.03, "writing", filled(WRITING)),
    (0.02, "chat", filled(CHAT)),
    (0.02, "chat", around("chat")),
]


def prompts(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` different (prompt, category), in random order: all that we wrote first, if there is room, and made ones."""
    rng = random.Random(seed)
    found = {line: category for category, lines in WRITTEN.items() for line in lines}
    weights = [weight for weight, _, _ in MAKERS]
    while len(found) < count:
        _, category, make = rng.choices(MAKERS, weights)[0]
        found.setdefault(make(rng), category)
    known = held_back()
    mixed = [(prompt, category) for prompt, category in found.items() if prompt not in known]
    rng.shuffle(mixed)
    return mixed[:count]


def held_back() -> set[str]:
    """The evaluation prompts, which must not be learnt from."""
    lines = (Path(__file__).parent / "eval_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return {json.loads(line)["prompt"] for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write training prompts as JSON lines.")
    parser.add_argument("--count", type=int, default=80_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for prompt, category in prompts(args.count, args.seed):
        sys.stdout.write(json.dumps({"prompt": prompt, "category": category}) + "\n")


if __name__ == "__main__":
    main()
