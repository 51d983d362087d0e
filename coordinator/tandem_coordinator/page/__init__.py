"""The live page of a job, for users without dashboards (0014, docs/live-page.md).

    routes     the requests, and who may make them: one-time invitations, and cookies
    viewers    the open streams, and the parts that each has to be sent; renders the page while somebody looks
    timeline   a run from its logs, from its beginning, in bounded memory
    parts      the page's parts as HTML
    pictures   its charts

None of it runs while nobody looks. While somebody does, the event loop that answers heartbeats gives it a glance at
the job once a second; reading and drawing happen on a thread that rests three times as long as it reads.
"""
