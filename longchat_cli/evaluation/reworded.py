"""Facts asked in other words: no content word of a fact occurs in its question."""

_FACTS = """
The harbour master's terrier answers to Biscuit.
What is the pet of the official in charge of ships called?
Biscuit

Old Mrs Fenwick keeps her savings inside a teapot.
Where does the elderly widow hide the money?
teapot

The blacksmith's wife came from Portugal.
Which country was the spouse of the man who shoes horses born in?
Portugal

Every Thursday the baker shuts at noon.
On which day does the seller of bread close early?
Thursday

The lighthouse was repainted green last spring.
What colour is the tower that warns sailors now?
green

Captain Rowe is terribly afraid of spiders.
What creature frightens the commander of the vessel?
spiders

The schoolteacher plays the cello on Sundays.
Which instrument does the person who instructs children perform on?
cello

Doctor Amsel travels to her patients by bicycle.
How does the physician get to those who are ill?
bicycle

The gardener lost two fingers to a saw.
What tool injured the hand of the man who tends the flowers?
saw

Their youngest daughter wants to become a plumber.
Which trade does the smallest girl dream of?
plumber

The bride carried a bouquet of tulips.
What flowers did the woman getting married hold?
tulips

The inn's cook cannot stand garlic.
Which ingredient does the chef at the tavern hate?
garlic

Grandfather's wooden leg was carved out of walnut.
From what timber was the old man's false limb made?
walnut

The thief escaped dressed as a nun.
What disguise did the robber wear while fleeing?
nun

The mayor collects antique umbrellas.
What objects does the head of the town gather as a hobby?
umbrellas

A wasp stung the bishop on his nose.
Which part of the clergyman's face did the insect hurt?
nose

The miller's twin brother lives in Oslo.
In what city does the sibling of the man who grinds grain reside?
Oslo

The lawyer drinks nothing except buttermilk.
What is the only beverage the attorney takes?
buttermilk

Nobody at the orphanage could sleep because of an owl.
Which bird kept the home for parentless children awake?
owl

The carpenter paid for his boat with a violin.
What did the woodworker trade to obtain a vessel?
violin

The queen's crown was stolen by a juggler.
Which entertainer took the monarch's royal headgear?
juggler

The butcher sings tenor in the village choir.
Which voice part has the meat seller among the local singers?
tenor

Lightning destroyed the old chapel in October.
In which month was the small church ruined by a storm?
October

The librarian married an astronomer.
What is the profession of the husband of the keeper of books?
astronomer

The postman's bag was chewed by a goat.
Which animal damaged the sack of the man delivering letters?
goat

Aunt Clara's cure for every cold is mustard.
What remedy does the lady swear by whenever anybody sneezes?
mustard

The prisoner dug his tunnel using a spoon.
With which utensil did the captive make a way out?
spoon

The pilot always carries a lucky acorn.
What charm does the aviator bring along for good fortune?
acorn

The tailor owes the banker a horse.
What must the maker of suits give to the financier?
horse

The train was delayed by a fallen poplar.
What kind of tree held up the railway passengers?
poplar

The painter is blind in his left eye.
On which side can the artist not see?
left

The wedding cake tasted strongly of ginger.
Which spice dominated the dessert at the marriage feast?
ginger

The countess learned Hungarian in secret.
What language did the noblewoman quietly study?
Hungarian

The night watchman was once a champion fencer.
In what sport did the guard formerly excel?
fencer

The hermit built his hut beside a waterfall.
Near what natural feature does the recluse dwell?
waterfall

The spy concealed the map in a loaf of rye.
Inside what food was the chart put by the secret agent?
rye

The widow sold the farm to a clown.
Who bought the land from the bereaved woman?
clown

The judge's robe was lined with velvet.
What fabric was inside the magistrate's gown?
velvet

The shepherd reads the weather from his knee.
Which joint tells the keeper of flocks whether rain is coming?
knee

The museum's oldest piece is a comb.
What is the most ancient exhibit in the gallery?
comb

The sailor's tattoo shows a pelican.
What bird is inked on the skin of the seaman?
pelican

The ferry sank because of a loose rivet.
What small part caused the passenger boat to go down?
rivet

The chess champion lost to a nine-year-old from Lima.
What is the home city of the child who beat the master of the board game?
Lima

The apothecary grows saffron on the roof.
What plant does the druggist cultivate on top of the house?
saffron

The duke gave every servant a watch at Christmas.
What present did the nobleman hand his staff in December?
watch

The fisherman swears by cheese as bait.
With what does the angler lure a trout?
cheese

Our landlord used to be a hangman.
What was the earlier job of the owner of the building?
hangman

The violinist broke her wrist on the ice.
Which bone did the musician fracture by slipping in winter?
wrist

The printer's ink was mixed from soot.
What substance went into the black liquid for newspapers?
soot

The village well was poisoned with copper.
Which metal made the water source of the hamlet unsafe?
copper

The emperor's favourite dish was eel.
What did the ruler most like to eat?
eel

The smugglers met beneath the bandstand.
Under what structure did the illegal traders gather?
bandstand

The nurse stitched the wound with silk.
What thread did the hospital attendant use to close the cut?
silk

The bank's vault opens at the word heron.
Which password unlocks the strongroom full of gold?
heron

The general's parrot swears in Turkish.
In which tongue does the army leader's talking bird curse?
Turkish

The ballerina eats a raw onion before each show.
What vegetable does the dancer consume prior to performing?
onion

The scholar forgot his manuscript on a tram.
In what vehicle did the learned man leave the pages behind?
tram

The beekeeper is allergic to strawberries.
Which fruit makes the producer of honey ill?
strawberries

The statue in the square lacks an ear.
What is missing from the stone figure at the market place?
ear

The clockmaker retired to Iceland.
To which island did the repairer of timepieces move after giving up work?
Iceland
"""

REWORDED = [tuple(block.split("\n")) for block in _FACTS.strip().split("\n\n")]
"""(fact, question, answer), the answer a word or two of the fact."""
