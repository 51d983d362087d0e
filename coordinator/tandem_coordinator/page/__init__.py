"""The live page of a job, for users without dashboards (0014, docs/live-page.md).

    session    who may look: invitations that are good for once, and cookies
    tail       a log that is followed in small bites
    record     a run as its logs tell it, from its beginning, in bounded memory
    pictures   its charts
    parts      the page's parts as HTML
    viewers    who is looking, and what they have to be sent
    live       draws the parts again and again while somebody looks
    routes     the page's addresses

Nothing of it runs while nobody looks. While somebody does, the event loop that answers heartbeats gives it a glance at
the job once a second; reading and drawing happen on a thread that rests three times as long as it reads.
"""
