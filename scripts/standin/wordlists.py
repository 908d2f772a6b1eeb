"""The small world all corpus tasks draw from. Every word is one token of the stand-in."""

NAMES = (
    "Ana Ben Carl Dora Emma Finn Gina Hugo Iris Jack Kate Leo Mia Noah Olga Paul Rosa Sam "
    "Tina Vera Will Zoe Adam Beth Cora Dan Ella Fred Hana Ivan June Karl Lily Mark Nina Oscar Pia "
    "Ruth Tom Uma"
).split()

CITIES = (
    "Paris London Rome Oslo Cairo Lima Delhi Tokyo Berlin Madrid Vienna Dublin Athens Prague Seoul "
    "Boston Denver Sydney Geneva Lisbon"
).split()

JOBS = (
    "baker doctor farmer pilot teacher painter singer driver nurse writer sailor lawyer builder "
    "waiter gardener actor"
).split()

PETS = "cat dog fox rabbit horse parrot turtle mouse duck goat snake hamster".split()

COLOURS = "red blue green yellow black white brown pink orange purple".split()

FOODS = "pizza soup rice bread pasta salad cheese fish cake curry beans noodles".split()

# Things that are counted in word problems: always used in the plural.
THINGS = (
    "apples books pens coins cards stamps shells marbles eggs cookies balls stickers flowers "
    "stones pencils oranges candles toys cups keys"
).split()

# Things that come in containers: "4 boxes with 6 pens each".
CONTAINERS = "boxes bags baskets shelves jars rows packs drawers".split()
