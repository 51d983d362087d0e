{{/* Names, labels and images that the other templates share. */}}

{{- define "tandem.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* 50 characters leave room for suffixes. */}}
{{- define "tandem.fullname" -}}
{{- $name := include "tandem.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tandem.operator" -}}
{{- include "tandem.fullname" . }}-operator
{{- end -}}

{{- define "tandem.account" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "tandem.operator" .) -}}
{{- else -}}
{{- required "serviceAccount.name: say which account the operator has, or set serviceAccount.create to true" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Labels that never change, for selectors. */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: {{ include "tandem.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{/* All labels. The chart's own override additional ones, or a Deployment would not find its pods. Argument: a list of the chart's context, and additional labels. */}}
{{- define "tandem.labelled" -}}
{{- $ours := include "tandem.selector" (index . 0) | fromYaml -}}
{{- $_ := set $ours "app.kubernetes.io/version" (index . 0).Chart.AppVersion -}}
{{- $_ := set $ours "app.kubernetes.io/managed-by" (index . 0).Release.Service -}}
{{- $_ := set $ours "helm.sh/chart" (printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version | replace "+" "_") -}}
{{- toYaml (merge $ours (index . 1) (index . 0).Values.extraLabels) -}}
{{- end -}}

{{/* Labels of another component than the operator. Argument: a list of the chart's context, and the component. */}}
{{- define "tandem.labelledAs" -}}
{{- include "tandem.labelled" (list (index . 0) dict) | fromYaml | merge (dict "app.kubernetes.io/component" (index . 1)) | toYaml -}}
{{- end -}}

{{- define "tandem.mlflow" -}}
{{- include "tandem.fullname" . }}-mlflow
{{- end -}}

{{/* URL of the MLflow server of jobs that name none; empty if there is none. */}}
{{- define "tandem.mlflowUri" -}}
{{- if .Values.mlflow.uri -}}
{{- .Values.mlflow.uri -}}
{{- else if .Values.mlflow.enabled -}}
http://{{ include "tandem.mlflow" . }}.{{ .Release.Namespace }}.svc:5000
{{- end -}}
{{- end -}}

{{- define "tandem.labels" -}}
{{- include "tandem.labelled" (list . dict) -}}
{{- end -}}

{{/* Reference of an image. Argument: a list of the chart's context, and the image's name. */}}
{{- define "tandem.image" -}}
{{- $chart := index . 0 -}}
{{- $all := $chart.Values.images -}}
{{- $one := index $all (index . 1) -}}
{{- with $one.registry | default $all.registry -}}{{ trimSuffix "/" . }}/{{- end -}}
{{- $one.repository -}}
{{- if $one.digest -}}@{{ $one.digest }}{{- else -}}:{{ $one.tag | default $all.tag | default $chart.Chart.AppVersion }}{{- end -}}
{{- end -}}

{{/* Limits of a scrape. Prometheus drops a scrape that exceeds them. */}}
{{- define "tandem.limits" -}}
sampleLimit: {{ int64 .sampleLimit }}
labelLimit: 32
labelNameLengthLimit: 128
labelValueLengthLimit: 512
{{- end -}}
