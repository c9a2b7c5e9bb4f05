"""Word tables of the demo captions: translations, compounds, and words that say nothing about a picture."""


def _words(text: str) -> list[str]:
    return text.split()


_TRANSLATED = """
cavallo=horse donna=woman gatto=cat gatti=cats tigre=tiger tigri=tigers pinguino=penguin acquila=eagle aquila=eagle
profilo=profile simbolo=symbol simbol=symbol farfalla=butterfly farfalle=butterflies orso=bear rana=frog casa=house
pulsante=button finestra=window finestre=windows tasto=button ruota=wheel dentata=toothed foglie=leaves ragazza=girl
cigno=swan cigni=swans uccello=bird uccelli=birds dinosauro=dinosaur dinosauri=dinosaurs lucertola=lizard leone=lion
elefante=elephant legno=wood verde=green verdi=green montagna=mountain cubo=cube glace=ice+cream zazou=boy
cucina=kitchen padella=pan campeggio=camping lente=lens incendie=fire cronometro=stopwatch bussola=compass
grigia=gray grigio=gray grigi=gray traslocatore=mover carpentiere=carpenter rosa=pink gabbiano=seagull tacchino=turkey
nero=black neri=black coccinella=ladybug coccinelle=ladybug coccinellona=ladybug lumaca=snail moschito=mosquito
zanzara=mosquito mostriciattolo=monster punaisa=bug amibe=amoeba pescetto=fish lucchetto=padlock rossa=red rosso=red
sedia=chair neve=snow tatoo=tattoo libro=book macchina=machine vino=wine caffe=coffee tazza=cup gateau=cake
cassa=crate cestino=basket pennello=brush pinzatrice=stapler forbici=scissors ghiaccio=ice signorina=lady arbre=tree
fiore=flower fiori=flowers medicina=medicine provetta=test+tube provette=test+tubes sangue=blood attenzione=attention
eau=water teschio=skull chiave=key lampada=lamp sega=saw ambulans=ambulance ambulanza=ambulance vestito=dress
blocco=block cantiere=building+site principessa=princess serratura=lock bianchi=white bianco=white bionda=blond
bruna=dark notte=night gallo=rooster gufo=owl civetta=owl pollo=chicken egizio=egyptian stormo=flock abeille=bee
cavalletta=grasshopper semplice=simple formichina=ant formicona=ant insetto=insect libellula=dragonfly
libellule=dragonfly ragnetto=spider ragno=spider marino=sea arancione=orange arancioni=orange lucertolona=lizard
lucertolone=lizard canguro=kangaroo coniglio=rabbit labrador=labrador gattina=kitten pecora=sheep pecorella=sheep
porcinet=piglet topo=mouse toro=bull toros=bulls vacca=cow mucca=cow mucche=cows pezzata=spotted ramarro=lizard
tatuaggio=tattoo tatuaggi=tattoos capitello=capital demolizione=demolition costruzione=construction
poltrona=armchair ufficio=office ombrelloni=umbrellas tavolo=table tavola=table abitazione=house giardino=garden
campagna=country giallo=yellow salvagente=lifebuoy foglio=sheet pato=duck papera=duck anatra=duck borsa=bag
cesto=basket decorazione=decoration diamante=diamond geometrico=geometric sapin=fir bobine=reel casco=helmet
microfono=microphone cinepresa=camera fotografica=photo telecamera=video+camera bottiglia=bottle birra=beer
brindisi=toast calici=glasses posate=cutlery gauffre=waffle chocolat=chocolate gelato=ice+cream torta=cake
prugna=plum pera=pear fuoco=fire frullatore=mixer pomodori=tomatoes aglio=garlic pannocchia=corn zucca=pumpkin
peperoncino=chili ravanello=radish francobollo=stamp appunti=notes calcolatrice=calculator carta=paper
cartella=folder negozio=shop pieno=full vuoto=empty clessidra=hourglass diagramma=diagram fabbrica=factory
istogramma=histogram lana=wool lettera=letter tabella=table numero=number telefono=telephone dente=tooth
camicia=shirt seta=silk incinta=pregnant bambina=girl uomo=man nonno=grandfather fata=fairy fatina=fairy
pattinatrice=skater pattinatrici=skaters subacqueo=diver utente=user utenti=users albero=tree mazzo=bunch
umano=human seduto=sitting seduta=sitting couronne=crown pacco=parcel regalo=gift palloncini=balloons anelli=rings
televisore=television telecomando=remote+control chimico=chemical barattolo=jar pillole=pills siringa=syringe
microscopio=microscope carreau=diamond coeur=heart trefle=club rotondo=round civiere=stretcher orologio=clock
parete=wall binocolo=binoculars calamita=magnet ferro=iron forchettoni=forks grigliata=barbecue griglia=grill
meno=minus livella=level magnificator=magnifier pentola=pot secchio=bucket spugna=sponge scolapasta=colander
utensile=tool utensili=tools cacciavite=screwdriver viti=screws bicicletta=bicycle trattore=tractor
attaccapanni=coat+hanger condominio=apartment+building martellare=hammer montacarichi=goods+lift pittura=paint
natale=christmas uovo=egg sorridente=smiling miele=honey asse=board stiro=ironing betoniera=concrete+mixer
biberon=baby+bottle borsetta=handbag calzettoni=socks cammello=camel candela=candle carretta=cart ciuccio=pacifier
corridore=runner corsa=race elefantone=elephant fattoria=farm festoni=festoons fiocco=bow marroni=brown
ghirlande=garlands giardinaggio=gardening grattacieli=skyscrapers grondaia=gutter guanti=gloves pinze=pliers
imbianchino=painter gallina=hen motosega=chain+saw piedi=feet ragazzo=boy rilievo=relief sacco=sack pelo=fur
sapone=soap liquido=liquid scala=ladder doppia=double scatolone=box scodella=bowl spaventapasseri=scarecrow
stetoscopio=stethoscope struzzo=ostrich tavolozza=palette tenda=tent tramezzino=sandwich zaino=backpack
sortie=exit antilope=antelope beckham=player flamme=flame nuage=cloud pulsanti=buttons ours=bear fumer=smoking
extincteur=fire+extinguisher
echelle=ladder biologique=biological securite=security nucleare=nuclear emergenza=emergency giapponese=japanese
nocif=harmful toxique=toxic inflammables=flammable croche=eighth+note gru=crane ballon=balloon ballons=balloons
baloon=balloon vegitables=vegetables vegitable=vegetable disquete=floppy+disk tophat=top+hat silhouet=silhouette
cacuts=cactus stappler=stapler vavuum=vacuum volleball=volleyball southen=southern colour=color coloured=colored
favourites=favorites vehicules=vehicles france=france skoda=car chevrolet=car hummer=hummer toyota=car celtic=celtic
xmas=christmas eiffel=eiffel easter=easter canadian=canadian german=german irish=irish mexican=mexican thai=thai
russian=russian romanian=romanian spanish=spanish chinese=chinese italian=italian african=african italia=italy
jupiter=jupiter saturn=saturn venus=venus mars=mars italy=italy sweden=sweden brazil=brazil poland=poland
georgia=georgia armenia=armenia canada=canada argentina=argentina vancouver=vancouver einstein=einstein bach=bach
beethoven=beethoven handel=handel christmas=christmas rose=rose teddy=teddy christian=christian japanese=japanese
rollerblading=rollerblading biohazard=biohazard sunwheel=sun+wheel celticknotwork=celtic+knot libri=book
bali=bali tetris=tetris cyan=cyan dino=dinosaur champignon=mushroom gourami=fish loach=fish cichlid=fish
pesce=fish cane=dog cani=dogs scarpa=shoe mela=apple pane=bread nave=ship aereo=plane treno=train stella=star sole=sun
luna=moon mano=hand occhio=eye naso=nose bocca=mouth cuore=heart cornetto=croissant
"""
TRANSLATIONS: dict[str, str] = {
    pair.partition("=")[0]: pair.partition("=")[2].replace("+", " ") for pair in _TRANSLATED.split()
}

_COMPOUNDED = """
signalflag=signal+flag mapsym=map+symbol roadsign=road+sign roadsigns=road+signs appicon=icon musicstuff=music
icecream=ice+cream viewmag=magnifying+glass stickmen=stick+figure hdd=hard+disk cdrom=cd networksym=network
weathersym=weather bodypart=body+part arrowshape=arrow cdwriter=cd+writer usb=usb svg=svg trsh=trash fldr=folder
unmount=unmount dvd=dvd html=html filesaveas=save+file uparrow=up+arrow teddybear=teddy+bear cdimage=cd
filequickprint=print+file fontsizedown=smaller+font fontsizeup=larger+font viewmagfit=magnifying+glass lcd=lcd
joypad=game+controller outbox=outbox goto=go+to mycomp=my+computer mycomputer=my+computer favourites=favorites
bullethole=bullet+hole roadtravel=road+travel unitedstates=united+states northamerica=north+america
latin=latin palmtop=palmtop uppercase=uppercase tv=television pc=computer led=led silouettedonnavestiti=woman
texturelegno=wood+texture signorinacappello=lady+hat signorinafoulard=lady+scarf piggybank=piggy+bank
nosmoke=no+smoking pda=handheld+computer txt=text sportcar=sports+car handwithstar=hand+star voip=telephone
spinningtop=spinning+top jigsaw=jigsaw+piece callout=speech+bubble callouts=speech+bubble
"""
COMPOUNDS: dict[str, str] = {
    pair.partition("=")[0]: pair.partition("=")[2].replace("+", " ") for pair in _COMPOUNDED.split()
}

KEPT_WORDS: frozenset[str] = frozenset(TRANSLATIONS[word].split()[0] for word in TRANSLATIONS) | frozenset(
    _words("""
usb svg dvd html lcd led unmount palmtop cd tv africa europe asia america oceania
""")
)
SHORT_WORDS: frozenset[str] = frozenset(
    _words("""
a of in on no up to at by go ox
""")
)
DROPPED_WORDS: frozenset[str] = frozenset(
    _words("""
hash aiga rpg etiquette clipart openclipart cliparts clip gnome stock icons theme
elements elem symbole architetto francesco frances architett contour contorno submission obligatoire new
mod mime del della dei sul sulla nella con mio mia via the des les lois san an md jon franc francesc secours juliane
phillips krug
linda kim bwh ganson moser frederic ger nicu buculei bucu benji rollandin enrique meza snuatautisticido arki todd
olivier dave pena geral gerald yves guillo mose jakob lumen studi author artist version title unknown
untitled various misc test sample drawing image picture vector
""")
)
DROPPED_KEYWORDS: frozenset[str] = frozenset(
    _words("""
hash theme icons action lemon_theme_icon application filesystem magick unsorted special examples openclipart
mime-types mimetypes mimeicon signs_and_symbols united_nations_member subnational oceania_member 11 work architetto
francesco rollandin work appicon icon shape symbol symbols sign recreation activities equipment miscellany device
vegitable flags buttons desserts tools states organizations ideas creation back transportation day stock sudden
atmosphere quick fast map_symbol historic simple white bordered ornamental black study place lovecraft dvb
openclipart menu webpage entertainment desktop france_region work bow explode destroy shot gunshot desktop navy
protein carbohydrate plus rain northamerica north_america latin_america
""")
)
COLORS: frozenset[str] = frozenset(
    _words("""
black white red green blue yellow orange purple pink brown gray grey cyan violet
""")
)
